"""Messages through a process group of torch.distributed (Gloo), for ranks of different hosts.

An operation of Gloo costs some 100 us, so the tensors of a message travel side by side, as one.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from anabranch.runtime.guards.position import POSITION
from anabranch.runtime.transport.base import Receipt, Spec, guarded, lost
from anabranch.runtime.transport.packing import (
    Packing,
    is_plain,
    pack,
    packing_of,
    specs_of,
    unpack,
)


class ProcessGroupTransport:
    """Messages through a Gloo process group.

    Attributes:
        group: the process group; None when the transport has been closed.
    """

    def __init__(self, group: dist.ProcessGroup | None, timeout: float) -> None:
        self.group = group
        self._timeout = timedelta(seconds=timeout)
        self._reaper: _Reaper | None = None

    def send(self, tensors: Sequence[Tensor], rank: int, tag: int) -> None:
        if self._reaper is None:
            self._reaper = _Reaper(self._timeout)
        self._reaper.check()
        packing = packing_of(specs_of(tensors))
        if not packing.nbytes:
            return
        if len(tensors) == 1 and is_plain(tensors[0]):
            data = tensors[0].detach().view(-1).view(torch.uint8)
        else:
            data = torch.empty(packing.nbytes, dtype=torch.uint8)
            pack(tensors, packing, data.numpy().data, data.data_ptr())
        work = guarded(partial(dist.isend, data, rank, group=self.group, tag=tag))
        assert work is not None
        self._reaper.watch(work, data)

    def receive(self, specs: Sequence[Spec], device: torch.device, rank: int, tag: int) -> Receipt:
        packing = packing_of(tuple(specs))
        data = torch.empty(packing.nbytes, dtype=torch.uint8)
        work = None
        if packing.nbytes:  # tensors without elements do not travel
            work = guarded(partial(dist.irecv, data, rank, group=self.group, tag=tag))
            assert work is not None
        return _Posted(work, data, packing, device, self._timeout)

    def settle(self) -> None:
        """See ``Transport``; Gloo's threads send."""

    def flush(self) -> None:
        """See ``Transport``; a send of Gloo is done when its receive has been posted."""
        if self._reaper is not None:
            self._reaper.flush()

    def close(self) -> None:
        if self._reaper is not None:
            self._reaper.stop()
        if self.group is not None:
            dist.destroy_process_group(self.group)
            self.group = None


class _Reaper:
    """Thread that waits for sends, as Gloo frees a send only when somebody waits for it."""

    def __init__(self, timeout: timedelta) -> None:
        self._timeout = timeout
        self._sends: queue.SimpleQueue[tuple[dist.Work, Tensor] | threading.Event | None] = (
            queue.SimpleQueue()
        )
        self._broken: BaseException | None = None
        threading.Thread(target=self._reap, name="anabranch sends", daemon=True).start()

    def watch(self, work: dist.Work, data: Tensor) -> None:
        """Keep the memory of a send until it is done."""
        self._sends.put((work, data))

    def check(self) -> None:
        """Raise PeerLostError if a send has failed."""
        if self._broken is not None:
            raise lost(self._broken)

    def flush(self) -> None:
        """Wait for all sends."""
        done = threading.Event()
        self._sends.put(done)
        with POSITION.waiting():
            done.wait()
        self.check()

    def stop(self) -> None:
        """End the thread after the last send."""
        self._sends.put(None)

    def _reap(self) -> None:
        while (entry := self._sends.get()) is not None:
            if isinstance(entry, threading.Event):
                entry.set()
                continue
            try:
                if self._broken is None:
                    entry[0].wait(self._timeout)
            except RuntimeError as error:
                self._broken = error
            del entry


@dataclass(frozen=True, slots=True)
class _Posted:
    """A receive into one piece of memory; no work where nothing travels."""

    work: dist.Work | None
    data: Tensor
    packing: Packing
    device: torch.device
    timeout: timedelta

    def wait(self) -> list[Tensor]:
        if self.work is not None:
            with POSITION.waiting():
                guarded(partial(self.work.wait, self.timeout))
        tensors = unpack(self.packing, self.data.numpy().data)
        return [tensor.to(self.device) for tensor in tensors]
