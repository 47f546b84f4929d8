"""Messages between ranks with a GPU each, through NCCL.

NCCL has no tags, and operations on one communicator run in the order in which each end started
them. On a graph of stages senders and receivers start in different orders, so a shared communicator
would deadlock. Every channel (sender, receiver, tag) has a communicator of its own, in one
direction only. The tensors of one message are one NCCL group. All communicators are made and used
once at the start, in one order for the whole run, because the first use waits for the other end.

Streams of the GPU wait, the host hardly ever does. A send starts when the compute stream has made
its tensors. A receive starts when it is posted; the compute stream waits for it where its tensors
are first used. Receives take memory, so the host posts one only when the GPU has taken the last
message that the host had taken before it asked::

    slots 2   host   take 0, ask for 2    take 1, ask for 3    take 2 ...
              GPU                         takes 0: 2 is posted          takes 1: 3 is posted

The kernels of a channel run on a stream of PyTorch's pool of high priority. Channels that share one
would wait for each other, so a rank with more channels than streams is refused. A waiting kernel
occupies a queue of the driver: give it at least as many as a rank has channels, plus 2 (docs of
training), or it may stand before the computation that its peer needs.

A lost rank cannot be noticed by the host while a stream waits for it. NCCL's watchdog ends the
process after the timeout, the launcher earlier when it sees the other rank fail.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from anabranch.device import accelerator
from anabranch.errors import InvalidPlanError
from anabranch.runtime.guards.failure import PeerLostError
from anabranch.runtime.guards.position import POSITION
from anabranch.runtime.transport.base import Channel, Receipt, Spec, Transport, guarded

NUM_STREAMS = 32
"""Streams in PyTorch's pool of high priority."""

_POLL_S = 1e-4
"""Seconds between two looks at sends that have to be done."""


def require_streams(channels: Collection[Channel]) -> None:
    """Accept channels for which every rank has streams; InvalidPlanError names the busiest."""
    counts = Counter(rank for channel in channels for rank in (channel.sender, channel.receiver))
    rank, most = max(counts.items(), key=lambda item: (item[1], -item[0]), default=(0, 0))
    if most > NUM_STREAMS:
        raise InvalidPlanError(
            f"rank {rank} has {most} channels to other ranks (one per stage edge, direction and "
            f"rank at the other end), but a GPU has {NUM_STREAMS} streams for them; plan with "
            "fewer stages or fewer replicas"
        )


class GpuWire:
    """The channels of one rank with a GPU, and its compute stream."""

    def __init__(
        self, groups: Mapping[Channel, dist.ProcessGroup], rank: int, place: torch.device
    ) -> None:
        self._groups, self._rank, self._place = groups, rank, place
        self._ahead = accelerator.new_stream(place)

    def connect(self) -> None:
        """Use each channel once, in one order everywhere, so that no two ranks can deadlock."""
        for channel in sorted(self._groups):
            tensor = torch.zeros(1, device=self._place)
            self._start(channel, [tensor])
            accelerator.synchronize(self._place)

    def send(self, channel: Channel, tensors: Sequence[Tensor]) -> list[dist.Work]:
        """Start to send when the compute stream has made the tensors."""
        return self._start(channel, tensors)

    def receive(
        self, channel: Channel, specs: Sequence[Spec], device: torch.device
    ) -> tuple[list[dist.Work], list[Tensor]]:
        """Start to receive, whatever the compute stream does."""
        with self._ahead:
            tensors = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in specs]
            filled = [tensor for tensor in tensors if tensor.numel()]
            return (self._start(channel, filled) if filled else []), tensors

    def _start(self, channel: Channel, tensors: Sequence[Tensor]) -> list[dist.Work]:
        sends = channel.sender == self._rank
        operation: Any = dist.isend if sends else dist.irecv
        other = channel.receiver if sends else channel.sender
        group = self._groups[channel]
        operations = [dist.P2POp(operation, tensor, other, group) for tensor in tensors]
        return guarded(lambda: dist.batch_isend_irecv(operations))

    def fence(self) -> torch.Event:
        """Mark the place behind all that the compute stream has been given so far."""
        return accelerator.mark(self._place)


@dataclass(slots=True)
class _PostedChannel:
    """One channel's receives to be posted, and where the GPU takes the host's last message."""

    waiting: deque[_Receive] = field(default_factory=deque)
    taken: torch.Event | None = None


class NcclTransport:
    """Messages of this rank's ``channels`` through NCCL, of others (an edge that only an evaluation
    has) through ``otherwise``, which is closed with this one.
    """

    def __init__(
        self,
        rank: int,
        channels: Collection[Channel],
        wire: GpuWire,
        place: torch.device,
        timeout: float,
        otherwise: Transport,
    ) -> None:
        self._rank, self.wire, self._place, self._timeout = rank, wire, place, timeout
        self._otherwise = otherwise
        self._channels = frozenset(channels)
        self._lines = {
            channel: _PostedChannel() for channel in channels if channel.receiver == rank
        }
        self._sends: deque[tuple[list[dist.Work], list[Tensor]]] = deque()

    def send(self, tensors: Sequence[Tensor], rank: int, tag: int) -> None:
        channel = Channel(self._rank, rank, tag)
        if channel not in self._channels:
            self._otherwise.send(tensors, rank, tag)
            return
        self._let_go()
        self.post_due()
        moved = [
            tensor.detach()
            .to(self._place, non_blocking=True)
            .contiguous()
            .resolve_conj()
            .resolve_neg()
            for tensor in tensors
            if tensor.numel()
        ]
        if moved:
            # The caching allocator does not know of NCCL's stream.
            self._sends.append((self.wire.send(channel, moved), moved))

    def receive(self, specs: Sequence[Spec], device: torch.device, rank: int, tag: int) -> Receipt:
        line = self._lines.get(Channel(rank, self._rank, tag))
        if line is None:
            return self._otherwise.receive(specs, device, rank, tag)
        receive = _Receive(self, line, Channel(rank, self._rank, tag), tuple(specs), device)
        line.waiting.append(receive)
        self.post_due()
        return receive

    def post_due(self) -> None:
        """Post the receives for which the GPU is far enough."""
        for line in self._lines.values():
            while line.waiting and line.waiting[0].is_due:
                line.waiting.popleft().post()

    def flush(self) -> None:
        self._otherwise.flush()
        deadline = time.monotonic() + self._timeout
        with POSITION.waiting():
            while self._sends:
                self._let_go()
                if self._sends and time.monotonic() >= deadline:
                    raise PeerLostError(f"a message was not received within {self._timeout:g} s")
                time.sleep(_POLL_S if self._sends else 0)

    def _let_go(self) -> None:
        while self._sends and all(guarded(work.is_completed) for work in self._sends[0][0]):
            self._sends.popleft()

    def close(self) -> None:
        self._otherwise.close()
        self._sends.clear()


class _Receive:
    """A receive that is posted when the GPU is far enough, at the latest when it is waited for."""

    __slots__ = ("_after", "_channel", "_device", "_line", "_posted", "_specs", "_transport")
    _posted: tuple[list[dist.Work], list[Tensor]]

    def __init__(
        self,
        transport: NcclTransport,
        line: _PostedChannel,
        channel: Channel,
        specs: tuple[Spec, ...],
        device: torch.device,
    ) -> None:
        self._transport, self._line, self._channel = transport, line, channel
        self._specs, self._device, self._after = specs, device, line.taken

    @property
    def is_due(self) -> bool:
        return self._after is None or bool(self._after.query())

    def post(self) -> None:
        self._posted = self._transport.wire.receive(self._channel, self._specs, self._device)
        self._after = None

    def wait(self) -> list[Tensor]:
        self._transport.post_due()
        waiting = self._line.waiting
        while self in waiting:
            first = waiting.popleft()
            if first._after is not None:
                first._after.synchronize()
            first.post()
        works, tensors = self._posted
        for work in works:
            guarded(work.wait)  # the compute stream waits, not the host
        for tensor in tensors:
            if not tensor.is_cpu:
                tensor.record_stream(accelerator.current_stream(tensor.device))
        self._line.taken = self._transport.wire.fence()
        return tensors
