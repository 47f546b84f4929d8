"""Messages between ranks with a GPU each, through NCCL.

NCCL has no tags, and operations on one communicator run in the order in which each end started
them. There is one communicator for each ordered pair of ranks, and ``handshake`` decides in which
order, and when, devices get its two halves. The tensors of one message are one NCCL group.
All communicators are made and used once at the start, in one order for the whole run, because the
first use waits for the other end.

Streams of the GPU wait, the host hardly ever does. A send starts when the compute stream has made
its tensors, a receive when its buffer is free; the compute stream waits for it where its tensors
are first used::

    host           post 1   take 0   forward 0   post 2   take 1   forward 1
    pair stream    [receive 0]   [receive 1] ...
    compute                  wait 0 [forward 0]           wait 1 [forward 1]

A waiting kernel keeps a queue of the driver and a few multiprocessors, which the computation that
its peer needs must not lack: ``process_groups`` bounds both, and ``require_streams`` refuses plans
with too many pairs.

A lost rank cannot be noticed by the host while a stream waits for it. NCCL's watchdog ends the
process after the timeout, the launcher earlier when it sees the other rank fail.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from anabranch.device import accelerator
from anabranch.errors import TrainingError
from anabranch.runtime.guards.failure import PeerLostError
from anabranch.runtime.guards.position import POSITION
from anabranch.runtime.transport.base import Channel, Receipt, Spec, Transport, guarded
from anabranch.runtime.transport.handshake import Half, Handshake

Pair = tuple[int, int]
"""A sender and a receiver."""

_SENDS_AHEAD = 2
"""Sends of a channel for which the compute stream does not wait yet; their tensors stay."""


T = TypeVar("T")


class DeviceStreams:
    """Streams of an accelerator, from torch's pool in the order of their first use."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams: dict[Hashable, torch.Stream] = {}

    def fence(self) -> torch.Event:
        """Mark the position behind all that the compute stream has been given so far."""
        return accelerator.record_event(self._device)

    def start(self, key: Hashable, after: Any, call: Callable[[], T]) -> T:
        """Start an operation of a communicator behind a fence."""
        if key not in self._streams:
            self._streams[key] = accelerator.new_stream(self._device)
        stream = self._streams[key]
        stream.wait_event(after)
        with stream:  # NCCL's own stream waits for the one that is current
            return guarded(call)


class GpuWire:
    """Communicators of one rank with a GPU, and its compute stream."""

    def __init__(
        self, groups: Mapping[Pair, dist.ProcessGroup], rank: int, device: torch.device
    ) -> None:
        self._groups, self._rank, self._device = groups, rank, device
        self._streams = DeviceStreams(device)

    def connect(self) -> None:
        """Use each pair once, in one order everywhere, so that no two ranks can deadlock."""
        for pair in sorted(self._groups):
            self.start(pair, [torch.zeros(1, device=self._device)], self.fence())
            accelerator.synchronize(self._device)

    def start(self, pair: Pair, tensors: Sequence[Tensor], after: Any) -> list[dist.Work]:
        """Start to send or to receive tensors behind a fence."""
        sends = pair[0] == self._rank
        operation: Any = dist.isend if sends else dist.irecv
        group = self._groups[pair]
        operations = [dist.P2POp(operation, tensor, pair[sends], group) for tensor in tensors]
        return self._streams.start(pair, after, lambda: dist.batch_isend_irecv(operations))

    def join(self, works: Sequence[dist.Work]) -> None:
        """Let the compute stream wait for operations."""
        for work in works:
            guarded(work.wait)

    def fence(self) -> torch.Event:
        """Mark the position behind all that the compute stream has been given so far."""
        return self._streams.fence()


@dataclass(slots=True, eq=False)
class _Buffer:
    """Bytes on the device, and the fence on the compute stream behind their last readers."""

    storage: torch.UntypedStorage
    fence: Any
    is_lent: bool = True


class Buffers:
    """Buffers of all channels of a rank, made once and used again.

    A tensor of a message lies in a buffer of its channel for as long as anybody holds it, such as
    the autograd graph of its micro-batch. A channel has as many buffers as messages that were held
    at once, with those posted: micro-batches in flight, and one more. The allocator of the device
    never gets them back, so it need not know of the streams that fill them.

    The host is ahead of its device: a buffer that nobody holds any more may still be read by work
    that the device has queued. So it is filled again behind a fence, which follows all that the
    compute stream had been given by then.

    Attributes:
        nbytes: bytes of all buffers.

    Args:
        fence: marks the end of all that the compute stream has been given.
    """

    def __init__(self, device: torch.device, fence: Callable[[], Any]) -> None:
        self._device, self._fence = device, fence
        self._pools: defaultdict[Hashable, list[_Buffer]] = defaultdict(list)
        self.nbytes = 0

    def take(self, key: Hashable, spec: Spec) -> tuple[Tensor, Any]:
        """Return a tensor on a buffer of a pool, and the fence behind which it may be filled.

        Raises:
            TrainingError: if the device has no memory for another buffer.
        """
        shape, dtype = spec
        nbytes = shape.numel() * dtype.itemsize
        for buffer in self._pools[key]:
            if not buffer.is_lent and buffer.storage.nbytes() >= nbytes:
                break
        else:
            buffer = self._make(nbytes)
            self._pools[key].append(buffer)
        buffer.is_lent = True
        tensor = torch.empty(0, dtype=dtype, device=self._device)
        # A tensor of its own, not a view: a change in place is no change of its neighbours.
        tensor.set_(buffer.storage, 0, shape)  # type: ignore[call-overload]
        return tensor, buffer.fence

    def _make(self, nbytes: int) -> _Buffer:
        count = sum(map(len, self._pools.values()))
        try:
            made = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        except torch.OutOfMemoryError as error:
            raise TrainingError(
                f"{self._device} has no memory for {nbytes} bytes of a message, after {count} "
                f"buffers of {self.nbytes} bytes; plan with a smaller micro-batch, with "
                "recomputation or for more devices"
            ) from error
        self.nbytes += nbytes
        # Queued work of the device may still read this memory for an earlier tensor.
        return _Buffer(made.untyped_storage(), self._fence())

    def sweep(self) -> None:
        """Mark buffers as free that nobody holds any more."""
        fence = None
        for pool in self._pools.values():
            for buffer in pool:
                if buffer.is_lent and _uses(buffer.storage) == 1:  # the pool's own
                    fence = fence or self._fence()
                    buffer.is_lent, buffer.fence = False, fence


def _uses(storage: torch.UntypedStorage) -> int:
    """Return the number of references to a storage, of tensors and of autograd as well."""
    count: int = torch._C._storage_Use_Count(storage._cdata)
    return count


class NcclTransport:
    """Messages between the ranks of ``pairs`` through NCCL, others (along an edge that only an
    evaluation has) through ``otherwise``, which is closed with this one.
    """

    def __init__(
        self,
        rank: int,
        pairs: Collection[Pair],
        wire: GpuWire,
        device: torch.device,
        timeout: float,
        handshake: Handshake,
        otherwise: Transport,
    ) -> None:
        self._rank, self.wire, self._device, self._timeout = rank, wire, device, timeout
        self._pairs, self._handshake, self._otherwise = frozenset(pairs), handshake, otherwise
        self.buffers = Buffers(device, self._mark)
        self._sent: defaultdict[Channel, deque[_Send]] = defaultdict(deque)
        self._num_fences = 0

    def _mark(self) -> Fence:
        self._num_fences += 1
        return Fence(self._num_fences, self.wire.fence(), self._handshake.position)

    def send(self, tensors: Sequence[Tensor], rank: int, tag: int) -> None:
        channel = Channel(self._rank, rank, tag)
        self.buffers.sweep()
        if channel[:2] not in self._pairs:
            send = partial(self._otherwise.send, tensors, rank, tag)
            self._handshake.offer(channel, send, self._handshake.position)
            return
        moved = [
            tensor.detach()
            .to(self._device, non_blocking=True)
            .contiguous()
            .resolve_conj()
            .resolve_neg()
            for tensor in tensors
            if tensor.numel()
        ]
        made = self._mark()
        # The caching allocator does not know of NCCL's stream.
        sent = _Send(moved, made.event, self.wire)
        sent.half = self._handshake.offer(channel, partial(sent.start, channel[:2]), made.position)
        if moved:
            self._sent[channel].append(sent)
        self._let_go(channel)

    def _let_go(self, channel: Channel) -> None:
        """Drop tensors that have been sent. The device runs behind the host: the compute stream
        waits for older sends, so that their memory can be used again without the host.
        """
        sent = self._sent[channel]
        while (len(sent) > _SENDS_AHEAD and sent[0].half.is_given) or (sent and sent[0].is_done):
            self.wire.join(sent[0].works)
            self._handshake.joined(sent.popleft().half)

    def receive(self, specs: Sequence[Spec], device: torch.device, rank: int, tag: int) -> Receipt:
        channel = Channel(rank, self._rank, tag)
        self.buffers.sweep()
        receive, position = _Receive(self._handshake, self.wire), 0
        start: Callable[[], None]
        if channel[:2] not in self._pairs:
            start = partial(receive.start_otherwise, self._otherwise, specs, device, rank, tag)
        else:
            taken = [self.buffers.take((channel, i), spec) for i, spec in enumerate(specs)]
            receive.tensors = [tensor for tensor, _ in taken]
            after = max((fence for _, fence in taken), key=lambda fence: fence.number)
            start, position = partial(receive.start, channel[:2], after.event), after.position
        receive.half = self._handshake.offer(channel, start, position)
        return receive

    def settle(self) -> None:
        self._handshake.settle()

    def flush(self) -> None:
        self._otherwise.flush()
        deadline = time.monotonic() + self._timeout
        with POSITION.waiting():
            while not all(s.is_done for sends in self._sent.values() for s in sends):
                if time.monotonic() >= deadline:
                    raise PeerLostError(f"a message was not received within {self._timeout:g} s")
                self._handshake.progress(1e-4)  # seconds until the next look at sends
        self._sent.clear()

    def close(self) -> None:
        self._otherwise.close()
        self._sent.clear()


class Fence(NamedTuple):
    """A position of the compute stream: ``event`` for the device, ``position`` for the hosts."""

    number: int
    event: Any
    position: int


class _Send:
    """Tensors of a message, until they are sent."""

    __slots__ = ("_made", "_tensors", "_wire", "half", "works")
    half: Half

    def __init__(self, tensors: list[Tensor], made: Any, wire: GpuWire) -> None:
        self._tensors, self._made, self._wire = tensors, made, wire
        self.works: list[Any] = []

    def start(self, pair: Pair) -> None:
        if self._tensors:
            self.works = self._wire.start(pair, self._tensors, self._made)

    @property
    def is_done(self) -> bool:
        return self.half.is_given and all(guarded(work.is_completed) for work in self.works)


class _Receive:
    """A receive whose buffers wait for the sender."""

    __slots__ = ("_handshake", "_inner", "_wire", "_works", "half", "tensors")
    half: Half

    def __init__(self, handshake: Handshake, wire: GpuWire) -> None:
        self._handshake, self._wire = handshake, wire
        self._works: list[Any] = []
        self._inner: Receipt | None = None
        self.tensors: list[Tensor] = []

    def start(self, pair: Pair, after: Any) -> None:
        if filled := [tensor for tensor in self.tensors if tensor.numel()]:
            self._works = self._wire.start(pair, filled, after)

    def start_otherwise(self, transport: Transport, *args: Any) -> None:
        self._inner = transport.receive(*args)

    def wait(self) -> list[Tensor]:
        if not self.half.is_given:
            self._handshake.wait_given(self.half)
        if self._inner is not None:
            return self._inner.wait()
        self._wire.join(self._works)  # the compute stream waits, not the host
        self._handshake.joined(self.half)
        tensors, self.tensors, self._works = self.tensors, [], []
        return tensors
