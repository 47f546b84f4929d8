"""The runtime's own transport and sums on the model, and two orders of posting that hang on it."""

from __future__ import annotations

import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from anabranch.runtime.collectives import DeviceSums, Pending
from anabranch.runtime.process_groups import blocks_of
from anabranch.runtime.transport import Channel, NcclTransport, Receipt, Spec
from anabranch.runtime.transport.handshake import Half, Handshake
from anabranch.runtime.transport.notices import Notice, Word
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


class SendsFirst(Handshake):
    """Every receive is given when its send has been; no rank waits for anybody before it sends."""

    def offer(self, channel: Channel, give: Callable[[], None], place: int) -> Half:
        half = Half(channel, give, place)
        if channel.sender == self._rank:
            self._give(half)
            self._tell(channel, Word.BEGUN)
        else:
            self._lines[channel].halves.append(half)
            self._receive(channel)
        self.progress()
        return half

    def progress(self, wait_s: float = 0.0, ranks: Collection[int] = ()) -> None:
        for notice in self._notices.heard(wait_s):
            if notice.word is Word.HERE:
                self._here[notice.rank, notice.number] += 1
            else:
                channel = Channel(notice.rank, self._rank, notice.number)
                self._lines[channel].available += 1
                self._receive(channel)

    def _receive(self, channel: Channel) -> None:
        line = self._lines[channel]
        while line.halves and line.available:
            line.available -= 1
            self._give(line.halves.popleft())


class PostedAhead:
    """The order of posting that the runtime had: a communicator per channel, sends at once, a
    receive when the device has taken the message that the host had taken before it asked.
    """

    def __init__(self, wire: ModelWire) -> None:
        self.wire = wire
        self._waiting: defaultdict[Channel, deque[_PostedReceive]] = defaultdict(deque)
        self._taken: dict[Channel, Operation | None] = {}
        self._sent: list[tuple[Tensor, Work]] = []
        self.kept: list[Tensor] = []  # in place of ``record_stream``

    def send(self, tensors: Sequence[Tensor], rank: int, tag: int) -> None:
        self._sent = [(t, work) for t, work in self._sent if not work.is_completed()]
        self.post_due()
        moved = [tensor.detach() for tensor in tensors]
        (work,) = self.wire.start((self.wire.rank, rank, tag), moved, self.wire.fence())
        self._sent.append((moved[0], work))

    def receive(self, specs: Sequence[Spec], device: torch.device, rank: int, tag: int) -> Receipt:
        channel = Channel(rank, self.wire.rank, tag)
        receive = _PostedReceive(self, channel, self._taken.get(channel))
        self._waiting[channel].append(receive)
        self.post_due()
        return receive

    def post_due(self) -> None:
        for waiting in self._waiting.values():
            while waiting and (waiting[0].after is None or waiting[0].after.state == DONE):
                waiting.popleft().post()

    def settle(self) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...


class _PostedReceive:
    def __init__(self, end: PostedAhead, channel: Channel, after: Operation | None) -> None:
        self._end, self._channel, self.after = end, channel, after

    def post(self) -> None:
        self._tensors = [torch.empty(1)]
        self._end.kept += self._tensors
        self._works = self._end.wire.start(self._channel, self._tensors, None)

    def wait(self) -> list[Tensor]:
        self._end.post_due()
        waiting = self._end._waiting[self._channel]
        while self in waiting:
            first = waiting.popleft()
            if first.after is not None:
                self._end.wire.world.synchronize(self._end.wire.rank, "a wait for a slot")
            first.post()
        self._end.wire.join(self._works)
        self._end._taken[self._channel] = self._end.wire.fence()
        return self._tensors


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
        kinds = {"sends first": SendsFirst, "behind anything": BehindAnything}
        kind = kinds.get(order, Handshake)
        self.handshake = handshake = kind(rank, ModelNotices(post, rank), 60.0)
        self.sums: Any
        self.transport: Any
        if order == "posted ahead":
            self.transport, self.sums = PostedAhead(wire), SumsAtOnce(wire)
            return
        otherwise = LocalTransport(Hub(), rank)
        self.transport = NcclTransport(rank, pairs, wire, CPU, 60.0, handshake, otherwise)
        if order == "sums at once":
            self.sums = SumsAtOnce(wire)
            return
        meeting = lambda ranks: handshake.meeting(ranks, sets.index(ranks))  # noqa: E731
        self.sums = DeviceSums(meeting, ModelStreams(wire))
