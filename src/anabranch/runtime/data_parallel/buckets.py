"""Buckets of gradients that travel together in one all-reduce.

::

    flat buffer   | gradient of a | gradient of b | gradient of c | has a | has b | has c |

The buffer is kept from step to step, and gradients are views of it from the first micro-batch on:
autograd makes the first gradient of a parameter, which is copied to its place, and adds the others
there. So the bits are those without buckets (zeros in their place would turn -0 into 0), and
accumulating takes no memory besides the buffer (``benchmarks.memory``).

A parameter without a gradient on any holder must keep none, so that the optimizer leaves it alone;
hence the flags.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from anabranch.runtime.data_parallel.shards import Shard, Shards
from anabranch.runtime.ranks.collectives import Pending
from anabranch.runtime.ranks.mesh import Mesh, Ranks

Named = tuple[str, nn.Parameter]


class Bucket(ABC):
    """Parameters of one element type and one replica group, and the sum of their gradients.

    Attributes:
        missing: number of parameters whose gradient has not been put.
        flat: buffer of this rank's terms; None before the first gradient.

    Args:
        ranks: the replica group, ascending.
        shards: shards of each parameter, the same for all.
    """

    missing: int
    flat: Tensor | None = None

    def __init__(
        self, ranks: Ranks, named: Iterable[Named], mesh: Mesh, shards: Shards = ()
    ) -> None:
        self.ranks, self.named, self.shards = ranks, tuple(named), shards
        self._mesh = mesh
        self._own = [shard for shard in shards if shard.rank == mesh.rank]
        self._pending: list[Pending] = []

        self.begin()

    @property
    def is_pending(self) -> bool:
        """True from ``start`` until the sums have been taken."""
        return bool(self._pending)

    def begin(self, batch_sizes: Sequence[int] = ()) -> None:
        """Begin an update from batches of these sizes."""
        self.missing = len(self.named)
        self._gradients: list[Tensor | None] = [None] * len(self.named)
        self._batch_sizes = tuple(batch_sizes)

    @abstractmethod
    def hold(self, index: int) -> None:
        """Keep a parameter's gradient where those of other micro-batches are added to it."""

    def put(self, index: int) -> None:
        """Take a final gradient; ``.grad`` is None until ``hand_out``."""
        parameter = self.named[index][1]
        self._gradients[index], parameter.grad = parameter.grad, None
        self.missing -= 1
        if not self.missing:
            self._fill(self._gradients)
            self._gradients = []

    @abstractmethod
    def _fill(self, gradients: Sequence[Tensor | None]) -> None:
        """Lay this rank's terms out to be sent; None for parameters without a gradient."""

    def start(self, *, everywhere: bool = False) -> None:
        """Start to sum over the ranks, once every gradient has been put.

        Args:
            everywhere: whether all ranks get the sums, also of parameters that others update.
        """
        assert self.missing == 0
        all_get_it = everywhere or not self.shards
        self._is_mine = all_get_it or bool(self._own)
        self._pending = self._send(all_get_it=all_get_it)

    @abstractmethod
    def _send(self, *, all_get_it: bool) -> list[Pending]:
        """Start to sum over the ranks, for all of them or for those that update."""

    @abstractmethod
    def wait(self) -> Tensor | None:
        """Wait for the sums; return the numbers that ``hand_out`` needs on the host, if any."""

    @abstractmethod
    def hand_out(self, numbers: Sequence[float] | None) -> None:
        """Make the sums the gradients, given the numbers of ``wait``."""

    @abstractmethod
    def start_all_gather(self) -> Callable[[], None]:
        """Start the all-gather of updated parameters, free gradients; return how to finish it."""


class DenseBucket(Bucket):
    """Gradients side by side in one buffer."""

    def hold(self, index: int) -> None:
        """Make a parameter's gradient a view of the buffer.

        Sparse gradients stay as they are until ``put``: they are small, and autograd loses rows
        that it adds to a dense gradient (PyTorch 2.13: the only row of one column).
        """
        parameter = self.named[index][1]
        if parameter.grad is not None and not parameter.grad.is_sparse:
            parameter.grad = self._in_place(index, parameter.grad)

    def _in_place(self, index: int, gradient: Tensor) -> Tensor:
        """Return the view of the buffer that has a gradient."""
        self._buffer()
        view = self._views[index]
        if gradient is not view:
            with torch.no_grad():
                view.copy_(dense(gradient))
        return view

    def _fill(self, gradients: Sequence[Tensor | None]) -> None:
        self._buffer()
        self._lacks = any(gradient is None for gradient in gradients)
        self._flags.fill_(1)
        for i, gradient in enumerate(gradients):
            if gradient is None:
                self._views[i].zero_()
                self._flags[i] = 0
            else:
                self._in_place(i, gradient)

    def _send(self, *, all_get_it: bool) -> list[Pending]:
        flat, mesh, ranks = self._buffer(), self._mesh, self.ranks
        if all_get_it:
            return [mesh.start_all_reduce(flat, ranks)]
        pending = [mesh.start_reduce(self._of(s), ranks, s.rank) for s in self.shards]
        if len(pending) > 1:  # each has its rows without the flags
            pending.append(mesh.start_all_reduce(self._flags, ranks))
        return pending

    def _of(self, shard: Shard) -> Tensor:
        """Return the part of the buffer that has a shard: all of it, or rows of one parameter, as
        no two parameters are cut alike (``cost.memory.deal``).
        """
        if shard.stop is None:
            return self._buffer()
        ((_, parameter),) = self.named
        return shard.of(self._flats[0].view(len(parameter), -1))

    def start_all_gather(self) -> Callable[[], None]:
        """Send parameters in the buffer, where those that one rank updates lie side by side."""
        self._buffer()
        received, into, pending = list[Tensor](), list[Tensor](), list[Pending]()
        for _, parameter in self.named:
            parameter.grad = None
        for shard in self.shards:
            values = [shard.of(view) for view in self._views]
            rows = [shard.of(parameter.detach()) for _, parameter in self.named]
            if shard in self._own:
                torch._foreach_copy_(values, rows)
            else:
                received += values
                into += rows
            pending.append(self._mesh.start_broadcast(self._of(shard), shard.rank, self.ranks))

        def finish() -> None:
            for share in pending:
                share.wait()
            if received:
                with torch.no_grad():
                    torch._foreach_copy_(into, received)

        return finish

    def wait(self) -> Tensor | None:
        """Wait for the sums; return flags of parameters with a gradient on any rank, unless this
        rank has all gradients.
        """
        for pending in self._pending:
            pending.wait()
        self._pending = []
        return self._flags.real if self._lacks else None  # complex beside complex gradients

    def hand_out(self, numbers: Sequence[float] | None) -> None:
        """Make the sums the gradients of those parameters."""
        known = [1.0] * len(self.named) if numbers is None else numbers
        for (_, parameter), view, has in zip(self.named, self._views, known, strict=True):
            parameter.grad = view if has > 0 and self._is_mine else None

    def _buffer(self) -> Tensor:
        if self.flat is None:
            first = self.named[0][1]
            sizes = [parameter.numel() for _, parameter in self.named]
            self.flat = first.new_empty(sum(sizes) + len(sizes), requires_grad=False)
            *self._flats, self._flags = torch.split(self.flat, [*sizes, len(sizes)])
            # In the order in memory that a gradient has: fused optimizers count on it.
            self._views = [
                part.as_strided(p.shape, torch.empty_like(p, device="meta").stride())
                for part, (_, p) in zip(self._flats, self.named, strict=True)
            ]
        return self.flat


def entries(gradient: Tensor) -> Tensor:
    """Return the numbers of a gradient, without a sparse one's zeros; two per complex number."""
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    return torch.view_as_real(values) if values.is_complex() else values


def dense(gradient: Tensor) -> Tensor:
    """Return a sparse gradient (of an embedding) as a dense one, others as they are."""
    return gradient.to_dense() if gradient.is_sparse else gradient
