"""The mesh of ranks: a plan's devices as processes and process groups; rank i is the i-th device.

Everything a rank knows of the others it computes from the plan, so collectives run in one order
everywhere, and only numbers travel. With one device every collective is the identity.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from anabranch.errors import (
    DataError,
    InvalidPlanError,
    NonFiniteError,
    StageFailedError,
    TrainingError,
)
from anabranch.plans.stages import StageGraph
from anabranch.runtime.guards.failure import Failure, PeerLostError, located
from anabranch.runtime.guards.same_batch import copies_digest, odd_ones, refusal
from anabranch.runtime.guards.store_watch import StoreWatch
from anabranch.runtime.process_groups import (
    RankDevice,
    abort,
    choose_backend,
    connect,
    destroy,
    join,
    new_group,
)
from anabranch.runtime.transport import (
    Channel,
    HostTransport,
    NcclTransport,
    ProcessGroupTransport,
    Receipt,
    Router,
    StagedTransport,
    Transport,
    guarded,
    meet,
)
from anabranch.runtime.transport.copies import GpuCopies
from anabranch.runtime.transport.nccl import GpuWire, require_streams

_FAILURE_KEY = "anabranch/failure"
_GRACE_S = 1.0
_CPU = torch.device("cpu")
_ALL: tuple[int, ...] = ()
"""The set of all ranks for what they have to tell each other. Where all of them share a parameter
as well, its sums begin in another order.
"""
_SMALL = 64
"""Numbers that make a small sum."""
_MOST_SMALL, _MOST_LARGE = 8, 4
"""Ranks of one host that sum by sending their terms to each other, at most, for small and for large
sums. A ring moves less than that from three ranks on, but Gloo's takes several turns of its
threads, and its sockets are several times slower than shared memory.
"""


def require_whole_replicas(graph: StageGraph) -> None:
    """Accept a plan without tensor parallelism, else raise InvalidPlanError."""
    sharded = [s for s, stage in enumerate(graph.stages) if stage.tensor > 1]
    if sharded:
        raise InvalidPlanError(
            f"the plan shares the operators of stage {sharded[0]} between "
            f"{graph.stages[sharded[0]].tensor} devices (tensor parallelism, in {len(sharded)} of "
            f"{len(graph)} stages), which can be planned and simulated but not run; plan with a "
            "profile that has no costs for tensor parallelism"
        )


class _HasClone(Protocol):
    """A store that other threads can have a connection of their own to."""

    def clone(self) -> Store:
        """The same store through another connection."""


class Pending(Protocol):
    """A collective that is under way."""

    @property
    def is_done(self) -> bool:
        """Whether ``wait`` would return at once."""

    def wait(self) -> Tensor:
        """The result, once it is there; PeerLostError if another rank is gone."""


class _Reduced:
    """A sum that a process group makes; without work it is there already."""

    def __init__(self, tensor: Tensor, work: dist.Work | None) -> None:
        self._tensor, self._work = tensor, work

    @property
    def is_done(self) -> bool:
        return self._work is None or self._work.is_completed()

    def wait(self) -> Tensor:
        if self._work is not None:
            guarded(self._work.wait)
            self._work = None
        return self._tensor


class _Exchanged:
    """A sum of terms that ranks send to each other, added in one order for the same bits."""

    def __init__(self, tensor: Tensor, rank: int, receipts: dict[int, Receipt]) -> None:
        self._tensor, self._rank, self._receipts = tensor, rank, receipts

    @property
    def is_done(self) -> bool:
        return not self._receipts

    def wait(self) -> Tensor:
        if self._receipts:
            total: Tensor | None = None
            # In the memory of the first term, then of this rank's; one more at a time, which
            # nothing holds any longer when the next one is made.
            for rank in sorted([self._rank, *self._receipts]):
                if rank == self._rank:
                    total = self._tensor if total is None else self._tensor.add_(total)
                elif total is None:
                    total = self._receipts.pop(rank).wait()[0]
                else:
                    total.add_(self._receipts.pop(rank).wait()[0])
        return self._tensor


class _Gathered:
    """What ranks have sent each other, one below the other."""

    def __init__(
        self, rows: Tensor, receipts: Mapping[int, Receipt], work: dist.Work | None
    ) -> None:
        self._rows, self._receipts, self._work = rows, dict(receipts), work

    @property
    def is_done(self) -> bool:
        return not self._receipts and (self._work is None or self._work.is_completed())

    def wait(self) -> Tensor:
        while self._receipts:
            place, receipt = self._receipts.popitem()
            self._rows[place] = receipt.wait()[0]
        if self._work is not None:
            guarded(self._work.wait)
            self._work = None
        return self._rows


def _unequal(ended: Mapping[int, int], more: Mapping[int, int]) -> str:
    fewer = " and ".join(f"rank {rank} has {count}" for rank, count in ended.items())
    most = ", ".join(f"rank {rank} is at number {number}" for rank, number in more.items())
    return (
        f"the ranks have unequal numbers of batches: {fewer}, and {most}; all ranks take the same "
        "batches, each of them its slice: give every rank the whole data, not a part of it, and "
        "let it end at the same place"
    )


class Mesh:
    """The ranks of one run, seen from one of them.

    Args:
        sets: sets of ranks that reduce among themselves, the same list on every rank.
        timeout: seconds until a silent peer counts as lost.

    Raises:
        InvalidPlanError: if the number of processes is not the number of devices.
    """

    def __init__(
        self,
        devices: Sequence[int],
        sets: Collection[tuple[int, ...]] = (),
        *,
        place: torch.device = _CPU,
        timeout: float = 600.0,
    ) -> None:
        self.devices = tuple(devices)
        join(timeout)
        self.size = dist.get_world_size() if dist.is_initialized() else 1
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        if self.size != len(self.devices):
            raise InvalidPlanError(
                f"the plan is for {len(self.devices)} devices, but {self.size} "
                f"process{'es run' if self.size > 1 else ' runs'} it; start one per device, with "
                f"anabranch.run or torchrun --nproc-per-node {len(self.devices)}"
            )
        self.device = self.devices[self.rank]
        self._timeout = timeout
        self._near: Transport | None = None  # to all ranks, where they share a host
        self._everyone = tuple(range(self.size))
        self._groups: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
        self._made: list[dist.ProcessGroup] = []
        self._on_gpus: list[dist.ProcessGroup] = []
        if self.size > 1:
            self._groups[_ALL] = self._new_group(self._everyone, "gloo")
            seen = self._exchange(RankDevice.here(place).packed)
            self.backend = choose_backend([RankDevice.unpacked(device) for device in seen])
            for ranks in sorted(set(sets)):
                if len(ranks) > 1:
                    self._groups[ranks] = self._new_group(ranks, self.backend)
            for group in self._on_gpus:
                connect(group, place)
            self.barrier()
        self.is_closed = False

    # A barrier follows whatever makes connections: a rank that fails, and leaves, as soon as its
    # own are made would disturb those who are still connecting to each other.
    def _new_group(
        self, ranks: tuple[int, ...], backend: str, *, prior: bool = False
    ) -> dist.ProcessGroup | None:
        group = new_group(ranks, self._timeout, backend, prior=prior)
        if group is not None:
            self._made.append(group)
            if backend == "nccl":
                self._on_gpus.append(group)
        return group

    def transport(
        self, place: torch.device = _CPU, channels: Collection[Channel] = ()
    ) -> Transport | None:
        """A transport to all other ranks for ``channels``, with connections of its own.

        On the CPU it goes through shared memory to ranks of this host, through Gloo to the rest.
        Ranks with a GPU each use NCCL; GPUs without it go through the host.
        """
        if self.size == 1:
            return None
        if place.type != "cuda":
            return self._host_transport()
        staged = StagedTransport(self._host_transport(), GpuCopies(place))
        if not channels or self.backend != "nccl":
            return staged
        require_streams(channels)
        mine = {}
        for channel in sorted(channels):
            group = self._new_group((channel.sender, channel.receiver), "nccl", prior=True)
            if group is not None:
                mine[channel] = group
        wire = GpuWire(mine, self.rank, place)
        wire.connect()
        self.barrier()
        return NcclTransport(self.rank, mine, wire, place, self._timeout, staged)

    def _host_transport(self) -> Transport:
        meeting = meet(self.rank, self._exchange)
        routes: dict[int, Transport] = {}
        transports: list[Transport] = []
        if meeting.peers:
            host = HostTransport(meeting, self._timeout)
            transports.append(host)
            routes = dict.fromkeys(meeting.peers, host)
        # A group is made by all ranks together, also by one that does not need it.
        if any(map(any, self._exchange(bytes([len(routes) < self.size - 1])))):
            group = guarded(
                lambda: dist.new_group(
                    list(self._everyone), timeout=timedelta(seconds=self._timeout), backend="gloo"
                )
            )
            remote = ProcessGroupTransport(group, self._timeout)
            transports.append(remote)
            routes = dict.fromkeys(self._everyone, remote) | routes
        elif transports and self._near is None:
            self._near = transports[0]
        self.barrier()
        return transports[0] if len(transports) == 1 else Router(routes, transports)

    def _exchange(self, mine: bytes) -> list[bytes]:
        """Everybody's bytes, of one length."""
        gathered = self.all_gather(torch.tensor(list(mine), dtype=torch.uint8))
        return [bytes(theirs.tolist()) for theirs in gathered]

    def all_reduce(self, tensor: Tensor, ranks: tuple[int, ...] | None = None) -> Tensor:
        """Sum over the ranks of a set (by default all), in place."""
        return self.start_all_reduce(tensor, ranks).wait()

    def start_all_reduce(self, tensor: Tensor, ranks: tuple[int, ...] | None = None) -> Pending:
        """As ``all_reduce``, in the background; ranks of one set start their sums in one order."""
        chosen, key = (self._everyone, _ALL) if ranks is None else (ranks, ranks)
        if len(chosen) == 1:
            return _Reduced(tensor, None)
        near = self._near_to(tensor, chosen)
        if near is not None:
            return self._exchange_terms(near, tensor, chosen, self._tag(key))
        work = guarded(lambda: dist.all_reduce(tensor, group=self._groups[key], async_op=True))
        return _Reduced(tensor, work)

    def start_reduce(self, tensor: Tensor, ranks: tuple[int, ...], target: int) -> Pending:
        """As ``start_all_reduce``, for one rank of a set; what others have then is undefined."""
        if len(ranks) == 1:
            return _Reduced(tensor, None)
        near = self._near_to(tensor, ranks)
        if near is not None:
            tag = self._tag(ranks)
            if target != self.rank:
                near.send([tensor], target, tag)
                return _Reduced(tensor, None)
            specs = [(tensor.shape, tensor.dtype)]
            others = [rank for rank in ranks if rank != target]
            receipts = {r: near.receive(specs, _CPU, r, tag) for r in others}
            return _Exchanged(tensor, self.rank, receipts)
        group = self._groups[ranks]
        work = guarded(lambda: dist.reduce(tensor, target, group=group, async_op=True))
        return _Reduced(tensor, work)

    def start_all_gather(self, tensor: Tensor, ranks: tuple[int, ...]) -> Pending:
        """Gather the tensors of a set, which have one shape, in the background; the result has a
        row for each rank. It is one of the sums of the set as to their order.
        """
        rows = tensor.new_empty((len(ranks), *tensor.shape))
        rows[ranks.index(self.rank)] = tensor
        if len(ranks) == 1:
            return _Gathered(rows, {}, None)
        near = self._near_to(tensor, ranks)
        if near is not None:
            receipts = self._to_all(near, tensor, ranks, self._tag(ranks))
            return _Gathered(rows, {ranks.index(r): got for r, got in receipts.items()}, None)
        group, parts = self._groups[ranks], list(rows.unbind(0))
        work = guarded(lambda: dist.all_gather(parts, tensor, group=group, async_op=True))
        return _Gathered(rows, {}, work)

    def start_broadcast(self, tensor: Tensor, source: int, ranks: tuple[int, ...]) -> Pending:
        """As ``broadcast``, in the background: one of the sums of the set as to their order. The
        tensor holds the copy once it has been waited for.
        """
        if len(ranks) == 1:
            return _Reduced(tensor, None)
        near = self._near_to(tensor, ranks)
        if near is None:
            group = self._groups[ranks]
            work = guarded(lambda: dist.broadcast(tensor, source, group=group, async_op=True))
            return _Reduced(tensor, work)
        tag = self._tag(ranks)
        if source != self.rank:
            receipt = near.receive([(tensor.shape, tensor.dtype)], _CPU, source, tag)
            return _Gathered(tensor[None], {0: receipt}, None)
        for rank in ranks:
            if rank != self.rank:
                near.send([tensor], rank, tag)
        return _Reduced(tensor, None)

    def _near_to(self, tensor: Tensor, ranks: tuple[int, ...]) -> Transport | None:
        """The transport by which these ranks had better send each other the whole tensor."""
        most = _MOST_SMALL if tensor.numel() <= _SMALL else _MOST_LARGE
        return self._near if len(ranks) <= most and not tensor.is_cuda else None

    def _tag(self, key: tuple[int, ...]) -> int:
        # Sums of one set start in one order, those of different sets do not.
        return -1 - sorted(self._groups).index(key)

    def _exchange_terms(
        self, near: Transport, tensor: Tensor, ranks: tuple[int, ...], tag: int
    ) -> _Exchanged:
        return _Exchanged(tensor, self.rank, self._to_all(near, tensor, ranks, tag))

    def _to_all(
        self, near: Transport, tensor: Tensor, ranks: tuple[int, ...], tag: int
    ) -> dict[int, Receipt]:
        others = [rank for rank in ranks if rank != self.rank]
        specs = [(tensor.shape, tensor.dtype)]
        receipts = {rank: near.receive(specs, _CPU, rank, tag) for rank in others}
        for rank in others:
            near.send([tensor], rank, tag)
        return receipts

    def broadcast(self, tensor: Tensor, source: int, ranks: tuple[int, ...] | None = None) -> None:
        """Copy a tensor from one rank of a set to the others, in place."""
        if self.size > 1 and (ranks is None or len(ranks) > 1):
            group = self._groups[_ALL if ranks is None else ranks]
            guarded(lambda: dist.broadcast(tensor, source, group=group))

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """The tensors of all ranks, which have one shape."""
        if self.size == 1:
            return [tensor]
        result = [torch.empty_like(tensor) for _ in range(self.size)]
        guarded(lambda: dist.all_gather(result, tensor, group=self._groups[_ALL]))
        return result

    def barrier(self) -> None:
        """Wait for every rank."""
        self.all_reduce(torch.zeros(1))

    def part(self, key: str, patience_s: float) -> None:
        """Wait up to ``patience_s`` until all ranks have come to ``key``, which is used once.

        A rank that ended while others still send to it would look to them like a failure. A barrier
        would need a place among the other sums.
        """
        if self.size == 1 or self.is_closed:
            return
        name = f"anabranch/part/{key}"
        # A rank that does not come has failed, of which others hear in another way.
        with contextlib.suppress(RuntimeError, ValueError):
            store = self._store()
            if store.add(name, 1) == self.size:
                store.set(f"{name}/all", "")
            store.wait([f"{name}/all"], timedelta(seconds=patience_s))

    def begin(self, loop: str, number: int) -> None:
        """Say that this rank begins unit ``number`` of a loop without a barrier between units.

        Costs two requests to the store, some 50 us.

        Raises:
            DataError: if another rank's loop has ended before it.
        """
        if self.size > 1:
            # Written before the others are read, as in ``end``, so one of two sees the other.
            self._store().set(f"{loop}/begun/{self.rank}", str(number + 1))
            if self._store().check([f"{loop}/ended"]):
                rank, count = map(int, self._store().get(f"{loop}/ended").split())
                if number >= count:
                    raise DataError(_unequal({rank: count}, {self.rank: number + 1}))

    def end(self, loop: str, count: int) -> None:
        """Say that this rank's loop ends after ``count`` units; DataError if others have more."""
        if self.size > 1:
            store = self._store()
            store.set(f"{loop}/ended", f"{self.rank} {count}")
            others = {r: f"{loop}/begun/{r}" for r in self._everyone if r != self.rank}
            begun = {r: int(store.get(key)) for r, key in others.items() if store.check([key])}
            if more := {rank: number for rank, number in begun.items() if number > count}:
                raise DataError(_unequal({self.rank: count}, more))

    @contextmanager
    def failing(self, close: Callable[[], None], graph: StageGraph | None = None) -> Iterator[None]:
        """Inside, a failure here reaches the other ranks, and one of theirs is explained."""
        try:
            with located(self.rank, graph):
                yield
        except NonFiniteError:
            raise  # on every rank at once; the caller may go on
        except PeerLostError as lost:
            close()
            raise self.explain(lost) from None
        except BaseException as error:
            self.publish(error)
            close()
            raise

    def publish(self, error: BaseException) -> None:
        """Tell the other ranks why this one ends; the first to do so is the cause."""
        if self.size == 1 or self.is_closed:
            return
        failure = Failure.of(error, self.rank)
        # A store that is gone cannot be told anything; the error itself must still reach the user.
        try:
            self._store().compare_set(_FAILURE_KEY, "", f"{self.rank}: {failure.message}")
        except (RuntimeError, ValueError):
            return

    def explain(self, lost: PeerLostError) -> BaseException:
        """What to raise on a rank whose connections broke; another rank has the cause.

        Under torchrun a rank leaves quietly if the cause is told; local ones report to their
        parent.
        """
        if "TORCHELASTIC_RUN_ID" not in os.environ:
            return lost
        deadline = time.monotonic() + _GRACE_S
        text = self._published()
        while not text and time.monotonic() < deadline:
            time.sleep(0.05)
            text = self._published()
        if text and not text.startswith(f"{self.rank}:"):
            return SystemExit(
                f"rank {self.rank} stops, because rank {text.partition(':')[0]} failed"
            )
        error = StageFailedError(
            f"rank {self.rank} lost another rank, which was killed or ended outside of the steps: "
            f"{lost}"
        )
        self.publish(error)
        return error

    def unequal_batches(self, digest: bytes) -> DataError:
        """What to raise where the batches of the ranks differ; all ranks ask together."""
        return DataError(refusal(odd_ones(self._exchange(digest), self._everyone)))

    def require_same_batch(self, digest: bytes) -> None:
        """Accept a batch that all ranks have alike; a DataError on every rank names those that have
        another one.
        """
        if self.size > 1 and (odd := odd_ones(self._exchange(digest), self._everyone)):
            raise DataError(refusal(odd))

    def require_same_copies(self, copies: Mapping[tuple[int, ...], Collection[Tensor]]) -> None:
        """Accept parameters whose copies are equal, bit for bit.

        Args:
            copies: sets of ranks -> this rank's copies of what they share; the same sets on all
                ranks, in one order, with nothing where this rank is not one.

        Raises:
            TrainingError: on every rank, naming those whose copies differ.
        """
        if self.size == 1 or not copies:
            return
        mine = torch.tensor([copies_digest(held) for held in copies.values()])
        told = [row.tolist() for row in self.all_gather(mine)]
        for index, ranks in enumerate(copies):
            if odd := odd_ones([told[rank][index] for rank in ranks], ranks):
                raise TrainingError(
                    f"{odd} other values of parameters that ranks "
                    f"{', '.join(map(str, ranks))} share: copies are updated alike and stay equal "
                    "bit for bit, so memory was damaged, or something else changes parameters on "
                    "some ranks only; resume from a checkpoint"
                )

    def watch(self, timeout_s: float) -> StoreWatch | None:
        """Watch under torchrun that the ranks go on; the launcher watches local ones."""
        if self.size == 1 or "TORCHELASTIC_RUN_ID" not in os.environ:
            return None
        # Every store of torch has it; its stubs do not.
        store = cast("_HasClone", self._store())
        return StoreWatch(store.clone(), self.rank, self.size, timeout_s, _FAILURE_KEY)

    def _published(self) -> str:
        try:
            store = self._store()
            return store.get(_FAILURE_KEY).decode() if store.check([_FAILURE_KEY]) else ""
        except (RuntimeError, ValueError):
            return ""

    def _store(self) -> Store:
        store: Store = dist.distributed_c10d._get_default_store()
        return store

    def close(self) -> None:
        """Break the connections of this rank's groups, after what they have under way."""
        if self.is_closed:
            return
        self.is_closed, self._near = True, None
        destroy(self._made)
        self._groups.clear()

    def abort(self) -> None:
        """As ``close``, without waiting for kernels that wait for a rank which is gone."""
        if not self.is_closed:
            abort(self._on_gpus)
            self._made = [group for group in self._made if group not in self._on_gpus]
            self.close()
