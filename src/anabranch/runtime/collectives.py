"""Collectives in progress, and collectives of a few ranks of one host by messages."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from anabranch.device import accelerator
from anabranch.runtime.guards.position import POSITION
from anabranch.runtime.transport import Receipt, Transport, guarded

_CPU = torch.device("cpu")

MOST_SMALL, MOST_LARGE = 8, 4
"""Ranks that sum by sending their terms to each other, at most, for small and for large tensors. A
ring moves less than that from three ranks on, but Gloo's takes several turns of its threads, and
its sockets are several times slower than shared memory.
"""
SMALL = 64
"""Numbers of a small tensor, at most."""


class Pending:
    """A collective that was started.

    Args:
        result: complete after ``wait``.
        work: operation of a process group, where one does it.
        finish: takes the messages of the other ranks, where those do it.
    """

    def __init__(
        self,
        result: Tensor,
        work: dist.Work | None = None,
        finish: Callable[[], object] | None = None,
    ) -> None:
        self._result, self._work, self._finish = result, work, finish

    @property
    def shape(self) -> torch.Size:
        """Shape of the result."""
        return self._result.shape

    @property
    def is_done(self) -> bool:
        """Return True if ``wait`` would return at once."""
        return self._finish is None and (self._work is None or self._work.is_completed())

    def wait(self) -> Tensor:
        """Return the complete result; raises PeerLostError if another rank is gone."""
        if self._work is None and self._finish is None:
            return self._result
        with POSITION.waiting():
            if self._work is not None:
                guarded(self._work.wait)
                self._work = None
            if self._finish is not None:
                finish, self._finish = self._finish, None
                finish()
        return self._result


def staged(start: Callable[..., Pending]) -> Callable[..., Pending]:
    """Wrap a method that starts a collective: tensors of devices that Gloo does not take go through
    the memory of the host.
    """

    @wraps(start)
    def through_host(mesh: Any, tensor: Tensor, *args: Any) -> Pending:
        if accelerator.has_collectives(tensor.device):
            return start(mesh, tensor, *args)
        pending = start(mesh, tensor.cpu(), *args)
        shape = pending.shape
        result = tensor if shape == tensor.shape else tensor.new_empty(shape)
        return Pending(result, finish=lambda: result.copy_(pending.wait()))

    return through_host


class MessageCollectives:
    """Collectives in which ranks send each other whole tensors of the CPU.

    Args:
        transport: to all ranks of the run.
    """

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
                rows[ranks.index(rank)] = receipts.pop(rank).wait()[0]

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
            elif total is None:
                total = receipts.pop(rank).wait()[0]
            else:
                total.add_(receipts.pop(rank).wait()[0])
