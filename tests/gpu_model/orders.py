"""The runtime's own transport and sums on the model, and two orders that hang on it: the model sees
what it should.
"""

from __future__ import annotations

import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from anabranch.runtime.ranks.collectives import DeviceSums, Pending
from anabranch.runtime.ranks.process_groups import blocks_of
from anabranch.runtime.transport import Channel, NcclTransport, Spec
from anabranch.runtime.transport.handshake import Half, Handshake
from anabranch.runtime.transport.notices import Notice
from tests.gpu_model.gpu import DONE, Operation, World
from tests.runtime.transport.local import Hub, LocalTransport

CPU = torch.device("cpu")
COMPUTE = "compute"
SPECS: list[Spec] = [(torch.Size([1]), torch.float32)]


class Work:
    """What NCCL gives back for an operation."""

    def __init__(self, wire: ModelWire, operation: Operation) -> None:
        self._wire, self.operation = wire, operation

    def is_completed(self) -> bool:
        world, rank = self._wire.world, self._wire.rank
        if self.operation.state == DONE:
            world.hosts[rank].past |= self.operation.past | self.operation.bit
        return self.operation.state == DONE

    def wait(self) -> None:
        self._wire.join([self])


class ModelWire:
    """``GpuWire`` and ``DeviceStreams`` of the model; numbers messages by communicator."""

    def __init__(self, world: World, rank: int, blocks: int) -> None:
        self.world, self.rank, self.blocks = world, rank, blocks
        self.device = world.devices[rank]
        self._numbers: defaultdict[Hashable, int] = defaultdict(int)

    def fence(self) -> Operation | None:
        return self.device.place(COMPUTE)

    def compute(self, name: str, tensors: Sequence[tuple[Tensor, Hashable]] = ()) -> None:
        """A kernel that reads received tensors."""
        self.world.call(self.rank, name)
        own = [(self._own(tensor.untyped_storage()._cdata), sent) for tensor, sent in tensors]
        self.device.give(COMPUTE, name, accesses=[(buffer, sent, False) for buffer, sent in own])

    def _own(self, buffer: Hashable) -> Hashable:
        return self.rank, buffer

    def start(self, pair: Any, tensors: Sequence[Tensor], after: Any) -> list[Work]:
        sends = pair[0] == self.rank
        what = f"{'send to' if sends else 'receive from'} rank {pair[sends]}"
        self.world.call(self.rank, what)
        number = self._numbers[pair]
        self._numbers[pair] += 1
        if after is not None:
            # A stream of ours waits, and NCCL's waits for it.
            after = self.device.give(("ours", pair), "fence", [after])
        if sends:
            # The memory is the allocator's again when nobody holds the tensor any more.
            buffer = self._own(("message", pair, number))
            weakref.finalize(tensors[0], self._freed, buffer).atexit = False
            accesses, payload = [(buffer, None, False)], int(tensors[0])
        else:
            storage = tensors[0].untyped_storage()._cdata
            accesses, payload = [(self._own(storage), None, True)], None
        operation = self.device.give(
            ("nccl", pair),
            f"{what}, number {number} of rank {self.rank}",
            [after],
            blocks=self.blocks,
            partners=(("message", pair, number), 2),
            accesses=accesses,
            payload=payload,
        )
        return [Work(self, operation)]

    def _freed(self, buffer: Hashable) -> None:
        """The allocator gives the memory to the next kernel of the compute stream."""
        if self.world.error is None and not self.world.hosts[self.rank].is_over:
            self.device.give(COMPUTE, "a kernel in freed memory", accesses=[(buffer, None, True)])

    def join(self, works: Sequence[Work]) -> None:
        for work in works:
            self.device.give(COMPUTE, "wait", [work.operation])


class ModelStreams:
    """``DeviceStreams`` of sums."""

    def __init__(self, wire: ModelWire) -> None:
        self._wire = wire

    def fence(self) -> Operation | None:
        return self._wire.fence()

    def start(self, ranks: tuple[int, ...], after: Any, call: Callable[[], Any]) -> Any:
        return start_sum(self._wire, ranks, after)


def start_sum(wire: ModelWire, ranks: tuple[int, ...], after: Any) -> Work:
    """Give a device its part of a sum."""
    wire.world.call(wire.rank, f"sum over {ranks}")
    number = wire._numbers[ranks, "sum"]
    wire._numbers[ranks, "sum"] += 1
    if after is not None:
        after = wire.device.give(("ours", ranks), "fence", [after])
    operation = wire.device.give(
        ("nccl", "sum", ranks),
        f"sum {number} over {ranks} on rank {wire.rank}",
        [after],
        blocks=wire.blocks,
        partners=(("sum", ranks, number), len(ranks)),
    )
    return Work(wire, operation)


class Post:
    """Notices of all ranks; each takes a drawn while."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.letters: list[deque[tuple[Notice, int]]] = [deque() for _ in world.hosts]


class ModelNotices:
    """``HostNotices`` of a rank."""

    def __init__(self, post: Post, rank: int) -> None:
        self._post, self._rank = post, rank

    def tell(self, rank: int, notice: Notice) -> None:
        past = self._post.world.hosts[self._rank].past
        self._post.letters[rank].append((notice, past))

    def heard(self, wait_s: float = 0.0, ranks: Collection[int] = ()) -> list[Notice]:
        world, letters = self._post.world, self._post.letters[self._rank]
        if wait_s:
            world.wait(self._rank, lambda: bool(letters), "a notice")
        elif world.draws.random() < 0.3:
            return []  # still on its way
        notices = []
        while letters:
            notice, past = letters.popleft()
            world.hosts[self._rank].past |= past
            notices.append(notice)
        return notices


class BehindAnything(Handshake):
    """First halves may wait, on their device, for others that are not closed."""

    def offer(self, channel: Channel, give: Callable[[], None], place: int) -> Half:
        return super().offer(channel, give, 0)


class SumsAtOnce:
    """Sums that a device gets where a gradient is complete, as the runtime had it."""

    def __init__(self, wire: ModelWire) -> None:
        self._wire = wire

    def add(self, ranks: tuple[int, ...], result: Tensor, call: Callable[[], Any]) -> Pending:
        work: Any = start_sum(self._wire, ranks, self._wire.fence())
        return Pending(result, finish=work.wait)

    def begin(self) -> None: ...


class Rank:
    """One rank's transport, sums and host."""

    def __init__(
        self,
        world: World,
        rank: int,
        post: Post,
        pairs: Sequence[tuple[int, int]],
        sets: Sequence[tuple[int, ...]],
        order: str,
    ) -> None:
        size = len(world.hosts)
        blocks = max(blocks_of(pairs, size), blocks_of(sets, size))
        self.rank, self.world, self.letters = rank, world, post.letters[rank]
        self.wire = wire = ModelWire(world, rank, blocks)
        kind = BehindAnything if order == "behind anything" else Handshake
        self.handshake = handshake = kind(rank, ModelNotices(post, rank), 60.0)
        otherwise = LocalTransport(Hub(), rank)
        self.transport = NcclTransport(rank, pairs, wire, CPU, 60.0, handshake, otherwise)
        self.sums: Any
        if order == "sums at once":
            self.sums = SumsAtOnce(wire)
            return
        meeting = lambda ranks: handshake.meeting(ranks, sets.index(ranks))  # noqa: E731
        self.sums = DeviceSums(meeting, ModelStreams(wire))
