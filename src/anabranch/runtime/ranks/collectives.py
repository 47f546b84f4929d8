"""Collectives in progress, and collectives of a few ranks of one host by messages."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from anabranch.runtime.guards.position import POSITION
from anabranch.runtime.transport import Receipt, Transport, guarded
from anabranch.runtime.transport.nccl import DeviceStreams

_CPU = torch.device("cpu")


class Pending:
    """A collective that was started.

    Args:
        result: tensor that is complete after ``wait``.
        work: operation of a process group, if one does the collective.
        finish: receives the messages of other ranks, if messages do the collective.
        progress: serves other ranks for a number of seconds, called while this one waits.
    """

    def __init__(
        self,
        result: Tensor,
        work: dist.Work | None = None,
        finish: Callable[[], object] | None = None,
        progress: Callable[[float], None] | None = None,
    ) -> None:
        self._result, self._work, self._finish = result, work, finish
        self._progress = progress

    def wait(self) -> Tensor:
        """Return the complete result; raises PeerLostError if another rank is gone, every time."""
        if self._work is None and self._finish is None:
            return self._result
        with POSITION.waiting():
            if self._work is not None:
                while self._progress is not None and not guarded(self._work.is_completed):
                    self._progress(2e-4)  # seconds until the next look
                guarded(self._work.wait)
                self._work = None
            if self._finish is not None:
                self._finish()
                self._finish = None
        return self._result


class DeviceSums:
    """Collectives of GPUs, which are launched when the hosts of all ranks of a set have come to
    them.

    A collective is a kernel that spins until all ranks have launched theirs. A host that launched
    one before another host is able to, and then waited for its device, would wait for ever. So
    collectives are kept until this rank waits for one, or ``begin``; the sets of ranks have one
    order everywhere. On the device each begins as soon as its tensor is complete, which may be long
    before the work that the host has queued by then.

    Args:
        meeting: context that begins when all ranks of a set have come, and holds the device.
    """

    def __init__(
        self,
        meeting: Callable[[tuple[int, ...]], AbstractContextManager[None]],
        streams: DeviceStreams,
    ) -> None:
        self._meeting, self._streams = meeting, streams
        self._kept: dict[tuple[int, ...], list[_Collective]] = defaultdict(list)

    def add(self, ranks: tuple[int, ...], result: Tensor, call: Callable[[], dist.Work]) -> Pending:
        """Start a collective, now or later; its tensors are complete on the compute stream."""
        collective = _Collective(call, self._streams.fence())
        self._kept[ranks].append(collective)

        def finish() -> None:
            if collective.work is None:
                self.begin()
            assert collective.work is not None
            guarded(collective.work.wait)

        return Pending(result, finish=finish)

    def begin(self) -> None:
        """Launch all kept collectives; on all ranks of a set between the same other ones."""
        for ranks in sorted(self._kept):
            collectives = self._kept.pop(ranks)
            with self._meeting(ranks):
                for collective in collectives:
                    start = self._streams.start
                    collective.work = start(ranks, collective.after, collective.call)


@dataclass(slots=True, eq=False)
class _Collective:
    """A kept collective, and the fence after which it may begin."""

    call: Callable[[], dist.Work]
    after: Any
    work: dist.Work | None = None


class MessageCollectives:
    """Collectives in which ranks send each other whole tensors of the CPU.

    A ring moves less than that from three ranks on, but Gloo's takes several turns of its threads,
    and its sockets are several times slower than shared memory.

    Args:
        transport: transport to all ranks of the run.
    """

    @staticmethod
    def are_faster(tensor: Tensor, num_ranks: int) -> bool:
        """Return True if messages are faster than Gloo's ring: few ranks, or small tensors."""
        return tensor.is_cpu and num_ranks <= (8 if tensor.numel() <= 64 else 4)

    def __init__(self, transport: Transport, rank: int) -> None:
        self._transport, self._rank = transport, rank

    def all_reduce(self, tensor: Tensor, ranks: tuple[int, ...], tag: int) -> Pending:
        """Start to sum over some ranks, in place."""
        receipts = self._exchange(tensor, ranks, tag)
        return Pending(tensor, finish=lambda: self._add(tensor, receipts))

    def reduce(self, tensor: Tensor, ranks: tuple[int, ...], target: int, tag: int) -> Pending:
        """Start to sum over some ranks for one of them, in place."""
        if target != self._rank:
            self._transport.send([tensor], target, tag)
            return Pending(tensor)
        receipts = {r: self._receive(tensor, r, tag) for r in ranks if r != target}
        return Pending(tensor, finish=lambda: self._add(tensor, receipts))

    def all_gather(self, rows: Tensor, ranks: tuple[int, ...], tag: int) -> Pending:
        """Start to fill the rows of a tensor, of which this rank has its own."""
        receipts = self._exchange(rows[ranks.index(self._rank)], ranks, tag)

        def fill() -> None:
            for rank in list(receipts):
                rows[ranks.index(rank)] = receipts[rank].wait()[0]
                del receipts[rank]

        return Pending(rows, finish=fill)

    def broadcast(self, tensor: Tensor, source: int, ranks: tuple[int, ...], tag: int) -> Pending:
        """Start to copy a tensor from one rank to some others, in place."""
        if source != self._rank:
            receipt = self._receive(tensor, source, tag)

            def fill() -> None:
                tensor[...] = receipt.wait()[0]

            return Pending(tensor, finish=fill)
        for rank in ranks:
            if rank != source:
                self._transport.send([tensor], rank, tag)
        return Pending(tensor)

    def _exchange(self, tensor: Tensor, ranks: tuple[int, ...], tag: int) -> dict[int, Receipt]:
        """Send a tensor to the other ranks, and post receives of theirs."""
        others = [rank for rank in ranks if rank != self._rank]
        receipts = {rank: self._receive(tensor, rank, tag) for rank in others}
        for rank in others:
            self._transport.send([tensor], rank, tag)
        return receipts

    def _receive(self, like: Tensor, rank: int, tag: int) -> Receipt:
        return self._transport.receive([(like.shape, like.dtype)], _CPU, rank, tag)

    def _add(self, tensor: Tensor, receipts: dict[int, Receipt]) -> None:
        """Add terms in the order of the ranks, for the same bits on all of them."""
        total: Tensor | None = None
        # In the memory of the first term, then of this rank's; one more at a time, which nothing
        # holds any longer when the next one is made.
        for rank in sorted([self._rank, *receipts]):
            if rank == self._rank:
                total = tensor if total is None else tensor.add_(total)
            else:
                term = receipts[rank].wait()[0]
                total = term if total is None else total.add_(term)
                del term, receipts[rank]
