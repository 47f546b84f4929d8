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
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice

import torch
from torch import Tensor, nn

from anabranch.cost.buckets import cut_into_buckets
from anabranch.runtime.collectives import Pending
from anabranch.runtime.data_parallel.shards import Shards
from anabranch.runtime.mesh import Mesh

Ranks = tuple[int, ...]
Named = tuple[str, nn.Parameter]


class Bucket(ABC):
    """Parameters of one element type and one replica group, and the sum of their gradients.

    Attributes:
        missing: parameters whose gradient has not been put.

    Args:
        ranks: the replica group, ascending.
        shards: of each parameter.
    """

    missing: int

    def __init__(self, ranks: Ranks, named: Iterable[Named], mesh: Mesh, shards: Shards) -> None:
        self.ranks, self.named, self.shards = ranks, tuple(named), shards
        self._mesh = mesh
        self._own = [shard for shard in shards if shard.rank == mesh.rank]
        self._pending: list[Pending] = []
        self._gathering: list[Pending] = []
        self._is_mine = True

    @property
    def is_pending(self) -> bool:
        """True from ``start`` until the sums have been taken."""
        return bool(self._pending)

    @property
    @abstractmethod
    def flat(self) -> Tensor | None:
        """Buffer of this rank's terms; None before the first gradient."""

    @abstractmethod
    def begin(self, batch_sizes: Sequence[int] = ()) -> None:
        """Begin an update from batches of these sizes."""

    @abstractmethod
    def hold(self, index: int) -> None:
        """Keep a parameter's gradient where those of other micro-batches are added to it."""

    @abstractmethod
    def put(self, index: int) -> None:
        """Move a final gradient into the bucket; ``.grad`` is None until ``take``."""

    @abstractmethod
    def start(self, *, everywhere: bool = False) -> None:
        """Start to sum over the ranks, once every gradient has been put.

        Args:
            everywhere: all ranks get the sums, whoever updates.
        """

    @abstractmethod
    def wait(self) -> Tensor:
        """Wait for the sums; return the numbers that ``hand_out`` needs on the host."""

    @abstractmethod
    def hand_out(self, numbers: Sequence[float]) -> None:
        """Make the sums the gradients, given the numbers of ``wait``."""

    @abstractmethod
    def start_all_gather(self) -> None:
        """Start the all-gather of updated parameters; gradients are None then."""

    def finish_all_gather(self) -> None:
        """Wait for the updated parameters."""
        for pending in self._gathering:
            pending.wait()
        if self._gathering and len(self._own) < len(self.shards):
            with torch.no_grad():
                self._take_gathered()
        self._gathering = []

    @abstractmethod
    def _take_gathered(self) -> None:
        """Copy received values into the parameters."""


class DenseBucket(Bucket):
    """Gradients side by side in one buffer."""

    def __init__(
        self, ranks: Ranks, named: Iterable[Named], mesh: Mesh, shards: Shards = ()
    ) -> None:
        super().__init__(ranks, named, mesh, shards)
        self._flat: Tensor | None = None
        self._views: list[Tensor] = []
        self.begin()

    def begin(self, batch_sizes: Sequence[int] = ()) -> None:
        """Their sizes do not depend on the batches."""
        self.missing = len(self.named)
        self._without: list[int] = []

    @property
    def flat(self) -> Tensor | None:
        """The buffer."""
        return self._flat

    def hold(self, index: int) -> None:
        """Make a parameter's gradient a view of the buffer.

        Rows of an embedding stay what they are until ``put``: they are small, and autograd loses
        some that it adds to a dense gradient (PyTorch 2.13: the only row of one column).
        """
        gradient = self.named[index][1].grad
        if gradient is not None and not gradient.is_sparse:
            self._move(index, gradient)

    def _move(self, index: int, gradient: Tensor) -> None:
        self._buffer()
        view = self._views[index]
        if gradient is not view:
            view.copy_(dense(gradient.detach()))
            self.named[index][1].grad = view

    def put(self, index: int) -> None:
        parameter = self.named[index][1]
        gradient = parameter.grad
        if gradient is None:
            self._buffer()
            self._views[index].zero_()
            self._without.append(index)
        else:
            self._move(index, gradient)
        parameter.grad = None
        self.missing -= 1
        if not self.missing:
            self._flags.fill_(1)
            for i in self._without:
                self._flags[i] = 0

    def start(self, *, everywhere: bool = False) -> None:
        assert self.missing == 0
        flat, mesh, ranks = self._buffer(), self._mesh, self.ranks
        all_get_it = everywhere or not self.shards
        self._is_mine = all_get_it or bool(self._own)
        if all_get_it:
            self._pending = [mesh.start_all_reduce(flat, ranks)]
        else:
            self._pending = [mesh.start_reduce(part, ranks, rank) for part, rank in self._parts()]
            if len(self.shards) > 1:
                self._pending.append(mesh.start_all_reduce(self._flags, ranks))

    def _parts(self) -> list[tuple[Tensor, int]]:
        """Return (part of the buffer, rank that updates it), shard by shard."""
        flat = self._buffer()
        if len(self.shards) == 1:
            return [(flat, self.shards[0].rank)]
        rows = [part.view(len(p), -1) for part, (_, p) in zip(self._flats, self.named, strict=True)]
        return [(shard.of(part), shard.rank) for part in rows for shard in self.shards]

    def start_all_gather(self) -> None:
        self._buffer()
        with torch.no_grad():
            for (_, parameter), view in zip(self.named, self._views, strict=True):
                parameter.grad = None
                for shard in self._own:
                    shard.of(view).copy_(shard.of(parameter))
        share = self._mesh.start_broadcast
        self._gathering = [share(part, rank, self.ranks) for part, rank in self._parts()]

    def _take_gathered(self) -> None:
        for (_, parameter), view in zip(self.named, self._views, strict=True):
            parameter.copy_(view)

    def wait(self) -> Tensor:
        """Wait for the sums; return per parameter whether any rank has a gradient."""
        for pending in self._pending:
            pending.wait()
        self._pending = []
        return self._flags.real  # complex beside complex gradients

    def hand_out(self, numbers: Sequence[float]) -> None:
        """Make the sums the gradients of those parameters."""
        for (_, parameter), view, has in zip(self.named, self._views, numbers, strict=True):
            parameter.grad = view if has > 0 and self._is_mine else None

    def _buffer(self) -> Tensor:
        if self._flat is None:
            first = self.named[0][1]
            sizes = [parameter.numel() for _, parameter in self.named]
            self._flat = first.new_empty(sum(sizes) + len(sizes), requires_grad=False)
            *self._flats, self._flags = torch.split(self._flat, [*sizes, len(sizes)])
            pairs = zip(self._flats, self.named, strict=True)
            # In the order in memory that a parameter has: fused optimizers count on it.
            self._views = [part.as_strided(p.shape, _strides(p)) for part, (_, p) in pairs]
        return self._flat


def _strides(parameter: Tensor) -> tuple[int, ...]:
    """Return the strides of its gradient, as autograd makes it."""
    return torch.empty_like(parameter, device="meta").stride()


def take(buckets: Iterable[Bucket]) -> None:
    """Wait for the sums of buckets and make them the gradients, with one device read."""
    pending = [bucket for bucket in buckets if bucket.is_pending]
    flags = [bucket.wait().double() for bucket in pending]
    numbers = iter(torch.cat(flags).tolist() if flags else ())
    for bucket, part in zip(pending, flags, strict=True):
        bucket.hand_out(list(islice(numbers, len(part))))


def cut(
    ranks: Ranks, named: Iterable[Named], mesh: Mesh, shards: Mapping[str, Shards]
) -> list[DenseBucket]:
    """Buckets of one element type and the same updaters each."""
    runs = cut_into_buckets(
        named,
        lambda item: item[1].numel() * item[1].element_size(),
        lambda item: item[1].dtype,
    )
    return [
        DenseBucket(ranks, part, mesh, cut) for run in runs for cut, part in by_shards(run, shards)
    ]


def by_shards(
    named: Iterable[Named], shards: Mapping[str, Shards]
) -> list[tuple[Shards, list[Named]]]:
    """Group parameters by their shards."""
    parts: dict[Shards, list[Named]] = {}
    for name, parameter in named:
        parts.setdefault(shards.get(name, ()), []).append((name, parameter))
    return list(parts.items())


def entries(gradient: Tensor) -> Tensor:
    """The numbers of a gradient, without the zeros of a sparse one; two for each complex one."""
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    return torch.view_as_real(values) if values.is_complex() else values


def dense(gradient: Tensor) -> Tensor:
    """A sparse gradient (of an embedding) in full, another one as it is."""
    return gradient.to_dense() if gradient.is_sparse else gradient
