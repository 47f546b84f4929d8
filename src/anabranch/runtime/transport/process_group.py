"""Messages through a process group of torch.distributed."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from anabranch.runtime.transport.base import Receipt, Spec, guarded, lost


class ProcessGroupTransport:
    """Messages through a Gloo process group; tensors on a GPU are staged through pinned host
    memory.

    Args:
        group: of all ranks; the transport closes it.
        timeout: seconds that a message may take before its peer counts as lost.
    """

    def __init__(self, group: dist.ProcessGroup | None, timeout: float) -> None:
        self._group = group
        self._timeout = timedelta(seconds=timeout)
        self._sends: queue.SimpleQueue[tuple[dist.Work, Tensor] | threading.Event | None] = (
            queue.SimpleQueue()
        )
        self._broken: BaseException | None = None
        # Gloo frees a send only for who waits for it. This thread waits, so a tensor lives no
        # longer than it must.
        self._reaper = threading.Thread(target=self._reap, name="anabranch sends", daemon=True)
        self._reaper.start()

    def send(self, tensors: Sequence[Tensor], rank: int, tag: int) -> None:
        """See ``Transport``."""
        if self._broken is not None:
            raise lost(self._broken)
        for tensor in tensors:
            self._send(tensor, rank, tag)

    def _send(self, tensor: Tensor, rank: int, tag: int) -> None:
        if tensor.is_cuda:
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            tensor = host.copy_(tensor)
        tensor = tensor.contiguous()
        if tensor.numel() == 0:
            return
        work = guarded(lambda: dist.isend(tensor, rank, group=self._group, tag=tag))
        assert work is not None
        self._sends.put((work, tensor))

    def receive(self, specs: Sequence[Spec], device: torch.device, rank: int, tag: int) -> Receipt:
        """See ``Transport``."""
        posted = []
        for shape, dtype in specs:
            buffer = torch.empty(shape, dtype=dtype, pin_memory=device.type == "cuda")
            work = None
            if buffer.numel():
                work = guarded(partial(dist.irecv, buffer, rank, group=self._group, tag=tag))
            posted.append((work, buffer))
        return _Posted(posted, device, self._timeout)

    def flush(self) -> None:
        """See ``Transport``."""
        done = threading.Event()
        self._sends.put(done)
        done.wait()
        if self._broken is not None:
            raise lost(self._broken)

    def close(self) -> None:
        """See ``Transport``."""
        self._sends.put(None)
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None

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


class _Posted:
    __slots__ = ("_device", "_posted", "_timeout")

    def __init__(
        self,
        posted: Sequence[tuple[dist.Work | None, Tensor]],
        device: torch.device,
        timeout: timedelta,
    ) -> None:
        self._posted, self._device, self._timeout = posted, device, timeout

    def wait(self) -> list[Tensor]:
        for work, _ in self._posted:
            if work is not None:
                guarded(partial(work.wait, self._timeout))
        return [buffer.to(self._device) for _, buffer in self._posted]
