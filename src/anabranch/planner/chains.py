"""The series-parallel tree in the form in which planners search it: chains of items.

A chain is a row of items, each an operator or a block; a block is a set of chains side by side::

    chain   [ stem ][ block ............. ][ head ][ loss ]
                    | chain [ a ][ b ][ c ]|
                    | chain [ d ][ e ]     |

A ``Row`` holds what every contiguous range [i, j) of items weighs, as (n + 1) x (n + 1) arrays,
whatever the number of samples. Branches of a block that ``cuts.signature`` calls the same are of
one class, and only its first is searched.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from anabranch.cost import CostModel
from anabranch.graph.cuts import Leaf, Node, Parallel, Series, operators, signature
from anabranch.graph.opgraph import bits

Matrix = NDArray[np.float64]


@dataclass(frozen=True)
class Traffic:
    """Bytes that cross the border of every range or cut: ``per_sample * samples + fixed``."""

    per_sample: Matrix
    fixed: Matrix

    def at(self, samples: float) -> Matrix:
        """Bytes for this many samples."""
        return (
            self.per_sample * samples + self.fixed
            if self._has_fixed
            else (self.per_sample * samples)
        )

    @cached_property
    def _has_fixed(self) -> bool:
        return bool(self.fixed.any())

    def plus(self, other: Traffic) -> Traffic:
        """Both together."""
        return Traffic(self.per_sample + other.per_sample, self.fixed + other.fixed)


class Row:
    """What every contiguous range of a row of parts weighs.

    Args:
        cost: prices the operators. masks: the parts, as bit masks of operators. Whatever they
            read comes from earlier parts or from before the row, whatever reads them is later or
            after it; parts may also lie side by side.
    """

    def __init__(self, cost: CostModel, masks: Sequence[int]) -> None:
        self.cost = cost
        self.masks = tuple(masks)
        self.size = len(self.masks)
        self._place = {op: k for k, mask in enumerate(self.masks) for op in bits(mask)}

    def mask(self, start: int, stop: int) -> int:
        """Operators of a range."""
        result = 0
        for mask in self.masks[start:stop]:
            result |= mask
        return result

    def compute_s(self, samples: float) -> NDArray[np.float64]:
        """Forward and backward seconds of the first j parts, for j = 0 .. size."""
        forward, backward = self.cost.op_seconds(samples)
        return self._running(forward + backward)

    @cached_property
    def kept_bytes(self) -> NDArray[np.float64]:
        """Bytes kept for the backward per sample by the first j parts."""
        return self._running(self.cost.kept_bytes)

    def _running(self, per_op: NDArray[np.float64]) -> NDArray[np.float64]:
        sums = [float(per_op[list(bits(mask))].sum()) for mask in self.masks]
        return np.concatenate([[0.0], np.cumsum(sums)])

    @cached_property
    def state_bytes(self) -> Matrix:
        """Parameters, gradients and optimizer state of every range."""
        everything = self._parameters(trainable=False)
        return everything + self.reduced_bytes * (1 + self.cost.optimizer_factor)

    @cached_property
    def reduced_bytes(self) -> Matrix:
        """Trainable parameters of every range: what replicas all-reduce."""
        return self._parameters(trainable=True)

    def _parameters(self, *, trainable: bool) -> Matrix:
        readers: dict[str, set[int]] = {}
        for op, place in self._place.items():
            for name in self.cost.graph.ops[op].parameters:
                readers.setdefault(name, set()).add(place)
        total = _Ranges(self.size)
        for parameter in self.cost.graph.parameters:
            if parameter.name in readers and (parameter.trainable or not trainable):
                total.add_read(parameter.nbytes, -1, sorted(readers[parameter.name]))
        return total.matrix()

    @cached_property
    def entering(self) -> Traffic:
        """What every range reads from outside."""
        return self._traffic(entering=True, gradients=False)

    @cached_property
    def leaving(self) -> Traffic:
        """What every range makes for others."""
        return self._traffic(entering=False, gradients=False)

    @cached_property
    def entering_gradients(self) -> Traffic:
        """The gradients of what leaves: they come back."""
        return self._traffic(entering=False, gradients=True)

    @cached_property
    def leaving_gradients(self) -> Traffic:
        """The gradients of what enters: they go back."""
        return self._traffic(entering=True, gradients=True)

    def _traffic(self, *, entering: bool, gradients: bool) -> Traffic:
        per_sample, fixed = _Ranges(self.size), _Ranges(self.size)
        for i in self._values:
            value = self.cost.graph.values[i]
            if gradients and not value.grad:
                continue
            total = per_sample if value.batched else fixed
            made = self._place.get(value.producer, -1)
            read = sorted({self._place.get(op, self.size) for op in value.consumers})
            if entering:
                total.add_read(value.nbytes, made, [place for place in read if place < self.size])
            elif made >= 0:
                total.add_made(value.nbytes, made, read[-1])
        return Traffic(per_sample.matrix(), fixed.matrix())

    @cached_property
    def comes(self) -> Traffic:
        """What enters every range and the gradients that come back to it."""
        return self.entering.plus(self.entering_gradients)

    @cached_property
    def goes(self) -> Traffic:
        """What leaves every range and the gradients that go back from it."""
        return self.leaving.plus(self.leaving_gradients)

    @cached_property
    def sole_reads(self) -> Traffic:
        """Per cut, what comes from outside and is read by nothing after the cut."""
        return self._sole(gradients=False)

    @cached_property
    def sole_gradients(self) -> Traffic:
        """Per cut, the gradients of ``sole_reads``."""
        return self._sole(gradients=True)

    def _sole(self, *, gradients: bool) -> Traffic:
        sums = np.zeros((2, self.size + 1))
        for i in self._values:
            value = self.cost.graph.values[i]
            if value.producer in self._place or (gradients and not value.grad):
                continue
            last = max(self._place.get(op, self.size) for op in value.consumers)
            sums[0 if value.batched else 1, last + 1 :] += value.nbytes
        return Traffic(sums[0], sums[1])

    @cached_property
    def _values(self) -> list[int]:
        found = {i for op in self._place for i in (*self.cost.made[op], *self.cost.read[op])}
        return sorted(found)


class _Ranges:
    """Sums over many values of "add this to all ranges [i, j) with i and j in these intervals"."""

    def __init__(self, size: int) -> None:
        self._steps = np.zeros((size + 2, size + 2))
        self._size = size

    def _add(self, amount: float, starts: tuple[int, int], stops: tuple[int, int]) -> None:
        (a, b), (c, d) = starts, stops
        self._steps[a, c] += amount
        self._steps[b, c] -= amount
        self._steps[a, d] -= amount
        self._steps[b, d] += amount

    def add_read(self, amount: float, made: int, read: Sequence[int]) -> None:
        """Ranges that hold one of the readers but not the maker."""
        last = made
        for place in read:
            if place > last:
                self._add(amount, (last + 1, place + 1), (place + 1, self._size + 1))
                last = place

    def add_made(self, amount: float, made: int, last_read: int) -> None:
        """Ranges that hold the maker but not the last reader."""
        self._add(amount, (0, made + 1), (made + 1, last_read + 1))

    def matrix(self) -> Matrix:
        """The sums, [i, j]."""
        return self._steps.cumsum(axis=0).cumsum(axis=1)[:-1, :-1]


@dataclass(frozen=True)
class Block:
    """Chains side by side.

    Attributes:
        branches: those of one class next to each other.
        classes: per branch, the first branch that is the same.
        row: the branches as a row: ranges are groups of whole branches.
    """

    branches: tuple[Chain, ...]
    classes: tuple[int, ...]
    row: Row


@dataclass(frozen=True)
class Chain:
    """Items in series.

    Attributes:
        items: operators, by index, and blocks. row: the items as a row. below: for every cut j,
            the most operators on a path through what comes after it in the whole model: no
            stage that ends at the cut has a greater height.
    """

    items: tuple[int | Block, ...]
    row: Row
    below: tuple[int, ...]

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The blocks among the items."""
        return tuple(item for item in self.items if isinstance(item, Block))


def build(cost: CostModel, tree: Node) -> Chain:
    """The chain that stands for a whole decomposition."""
    kept = [(c.forward_s, c.backward_s, c.kept_bytes) for c in cost.profile.costs]
    keys: list[Hashable] = [
        (
            kept[i],
            tuple(
                (parameter.nbytes, parameter.trainable)
                for parameter in (cost.parameters[name] for name in op.parameters)
            ),
        )
        for i, op in enumerate(cost.graph.ops)
    ]
    return _chain(cost, tree, 0, keys)


def line(cost: CostModel, order: Iterable[int]) -> Chain:
    """The chain of all operators in one topological order."""
    ops = tuple(order)
    return Chain(ops, Row(cost, [1 << op for op in ops]), tuple(range(len(ops), -1, -1)))


def span(chain: Chain) -> int:
    """Operators on the longest path: no plan is deeper."""
    return chain.below[0]


def _chain(cost: CostModel, node: Node, below: int, keys: Sequence[Hashable]) -> Chain:
    children = _flat(node)
    cuts = [below]
    items: list[int | Block] = []
    for child in reversed(children):
        items.append(child.op if isinstance(child, Leaf) else _block(cost, child, cuts[-1], keys))
        cuts.append(cuts[-1] + _span(child))
    masks = [_mask(child) for child in children]
    return Chain(tuple(reversed(items)), Row(cost, masks), tuple(reversed(cuts)))


def _flat(node: Node) -> list[Node]:
    """Children in series, those of a nested series in its place."""
    if not isinstance(node, Series):
        return [node]
    return [each for child in node.children for each in _flat(child)]


def _block(cost: CostModel, node: Node, below: int, keys: Sequence[Hashable]) -> Block:
    assert isinstance(node, Parallel)
    alike: dict[Hashable, list[Node]] = {}
    for child in node.children:
        alike.setdefault(signature(cost.graph, child, keys), []).append(child)
    classes: list[int] = []
    for group in alike.values():
        classes += [len(classes)] * len(group)
    ordered = [child for group in alike.values() for child in group]
    return Block(
        tuple(_chain(cost, child, below, keys) for child in ordered),
        tuple(classes),
        Row(cost, [_mask(child) for child in ordered]),
    )


def _mask(node: Node) -> int:
    return sum(1 << op for op in operators(node))


def _span(node: Node) -> int:
    if isinstance(node, Leaf):
        return 1
    spans = [_span(child) for child in node.children]
    return sum(spans) if isinstance(node, Series) else max(spans)
