"""Messages between ranks with a GPU each, through NCCL.

NCCL has no tags, and two operations on one communicator run in the order in which each end started
them. A sender starts its messages when they are computed, a receiver its receives ahead, each in
the order of its own schedule; on a graph of stages the two orders differ, and on a shared
communicator each end would then wait for the other for ever. So every channel (sender, receiver,
tag) has a communicator of its own, which carries messages in one direction only. Within a channel
the order is the same at both ends. The tensors of one message are one NCCL group.

All of them are made and used once at the start, in one order for the whole run: the first use of a
communicator waits for the other end, which must not happen in line.

The host waits for nothing: streams of the GPU do. A send starts when the compute stream has made
its tensors. A receive starts when it is posted, from a stream of its own, because it must not wait
for computation; the compute stream waits for it where its tensors are first used. A kernel that
waits for its peer occupies a part of the GPU and a queue of the driver: set
``CUDA_DEVICE_MAX_CONNECTIONS`` to at least the number of channels of a rank plus 2 (up to 32, by
default 8), or a waiting kernel may stand before the computation that its peer needs.

A lost rank cannot be noticed by the host while a stream waits for it. NCCL's watchdog in
torch.distributed ends the process after the timeout, and the launcher ends it earlier when it sees
the other one fail.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from anabranch.runtime.guards.failure import PeerLostError
from anabranch.runtime.transport.base import Channel, Receipt, Spec, Transport, guarded

_POLL_S = 1e-4


class NcclTransport:
    """Messages through NCCL; all ranks of the run make one together.

    Args:
        channels: all of the run, the same on every rank.
        otherwise: for messages on other channels, such as those of an edge that only an
            evaluation has; closed with this one.
    """

    def __init__(
        self,
        rank: int,
        channels: Collection[Channel],
        place: torch.device,
        timeout: float,
        otherwise: Transport,
    ) -> None:
        self._rank, self._place, self._timeout = rank, place, timeout
        self._otherwise = otherwise
        self._groups: dict[Channel, dist.ProcessGroup] = {}
        self._sends: deque[tuple[list[dist.Work], list[Tensor]]] = deque()
        self._ahead = torch.cuda.Stream(place)  # type: ignore[no-untyped-call]
        for channel in sorted(channels):
            group = guarded(partial(_new_group, channel, timeout))
            if group is not None and rank in (channel.sender, channel.receiver):
                self._groups[channel] = group
        self._connect()

    def _connect(self) -> None:
        """Use each channel once, in one order, so that no two ranks can wait for each other."""
        for channel in self._groups:
            tensor = torch.zeros(1, device=self._place)
            if channel.sender == self._rank:
                self._start(dist.isend, [tensor], channel, channel.receiver)
            else:
                self._start(dist.irecv, [tensor], channel, channel.sender)
            torch.cuda.synchronize(self._place)

    def send(self, tensors: Sequence[Tensor], rank: int, tag: int) -> None:
        if Channel(self._rank, rank, tag) not in self._groups:
            self._otherwise.send(tensors, rank, tag)
            return
        self._let_go()
        moved = [
            tensor.detach().to(self._place).contiguous().resolve_conj().resolve_neg()
            for tensor in tensors
            if tensor.numel()
        ]
        if moved:
            works = self._start(dist.isend, moved, Channel(self._rank, rank, tag), rank)
            # The caching allocator does not know of NCCL's stream.
            self._sends.append((works, moved))

    def receive(self, specs: Sequence[Spec], device: torch.device, rank: int, tag: int) -> Receipt:
        if Channel(rank, self._rank, tag) not in self._groups:
            return self._otherwise.receive(specs, device, rank, tag)
        with torch.cuda.stream(self._ahead):
            tensors = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in specs]
            filled = [tensor for tensor in tensors if tensor.numel()]
            works: list[dist.Work] = []
            if filled:
                works = self._start(dist.irecv, filled, Channel(rank, self._rank, tag), rank)
        return _Posted(works, tensors)

    def _start(
        self, operation: Callable[..., Any], tensors: list[Tensor], channel: Channel, rank: int
    ) -> list[dist.Work]:
        group = self._groups[channel]
        operations = [dist.P2POp(operation, tensor, rank, group) for tensor in tensors]
        return guarded(lambda: dist.batch_isend_irecv(operations))

    def push(self) -> None:
        self._otherwise.push()

    def flush(self) -> None:
        self._otherwise.flush()
        deadline = time.monotonic() + self._timeout
        while self._sends:
            self._let_go()
            if self._sends and time.monotonic() >= deadline:
                raise PeerLostError(f"a message was not received within {self._timeout:g} s")
            time.sleep(_POLL_S if self._sends else 0)

    def _let_go(self) -> None:
        while self._sends and all(
            guarded(partial(_is_completed, work)) for work in self._sends[0][0]
        ):
            self._sends.popleft()

    def close(self) -> None:
        self._otherwise.close()
        self._sends.clear()
        for group in self._groups.values():
            dist.destroy_process_group(group)
        self._groups.clear()


def _new_group(channel: Channel, timeout: float) -> dist.ProcessGroup | None:
    pair = [channel.sender, channel.receiver]
    group = dist.new_group(pair, timeout=timedelta(seconds=timeout), backend="nccl")
    return group if isinstance(group, dist.ProcessGroup) else None


def _is_completed(work: dist.Work) -> bool:
    return bool(work.is_completed())


class _Posted:
    __slots__ = ("_tensors", "_works")

    def __init__(self, works: list[dist.Work], tensors: list[Tensor]) -> None:
        self._works, self._tensors = works, tensors

    def wait(self) -> list[Tensor]:
        for work in self._works:
            guarded(work.wait)  # the compute stream waits, not the host
        for tensor in self._tensors:
            if tensor.is_cuda:
                tensor.record_stream(torch.cuda.current_stream(tensor.device))
        return self._tensors
