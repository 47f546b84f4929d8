"""The series-parallel tree in the form in which planners search it: chains of items.

A chain is a row of items, each an operator or a block; a block is a set of chains side by side::

    chain   [ stem ][ block ............. ][ head ][ loss ]
                    | chain [ a ][ b ][ c ]|
                    | chain [ d ][ e ]     |

``cost.nested_weights`` weighs contiguous ranges of items. Branches of a block with the same
``series_parallel.signature`` are of one class, and only its first is searched.

A model of more than ``SEARCH.items`` operators is made coarser: neighbours in a chain, whole blocks
and neighbouring branches become one item if together they are no more than their share of all
compute. So a boundary is up to one item away from where it would be best.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from anabranch.cost import CostModel
from anabranch.cost.nested_weights import NestedSets
from anabranch.graph.series_parallel import Leaf, Node, Parallel, Series, operators, signature
from anabranch.planner.partitioner.limits import SEARCH


@dataclass(frozen=True)
class Block:
    """Chains side by side.

    Attributes:
        classes: per branch, the first branch that is the same.
        row: the branches as a row: ranges are groups of whole branches.
    """

    branches: tuple[Chain, ...]
    classes: tuple[int, ...]
    row: NestedSets


@dataclass(frozen=True)
class Chain:
    """Items in series.

    Attributes:
        items: operators, by index, and blocks; several operators in one item by their first.
        below: for every cut j, the most items on a path through what comes after it in the whole
            model: no stage that ends at the cut has a greater height.
    """

    items: tuple[int | Block, ...]
    row: NestedSets
    below: tuple[int, ...]

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The blocks among the items."""
        return tuple(item for item in self.items if isinstance(item, Block))


def build(cost: CostModel, tree: Node) -> Chain:
    """The chain that stands for a whole decomposition."""
    return _Builder(cost).chain(tree, 0)


def line(cost: CostModel, order: Iterable[int], *, coarse: bool = False) -> Chain:
    """The chain of operators in one topological order, made coarser if asked and long."""
    ops: list[Node] = [Leaf(op) for op in order]
    parts = list(_Builder(cost).runs(ops)) if coarse else [[op] for op in ops]
    masks = [sum(_mask(op) for op in part) for part in parts]
    firsts = tuple(next(operators(part[0])) for part in parts)
    return Chain(firsts, NestedSets.row(cost, masks), tuple(range(len(firsts), -1, -1)))


def span(chain: Chain) -> int:
    """Items on the longest path: no plan is deeper."""
    return chain.below[0]


def count(chain: Chain) -> int:
    """Items of a chain and of all chains inside it."""
    inner = [branch for block in chain.blocks for branch in block.branches]
    return len(chain.items) + sum(map(count, inner))


class _Builder:
    """Builds chains for one model."""

    def __init__(self, cost: CostModel) -> None:
        self._cost = cost
        costs = cost.profile.costs
        self._seconds = [cost.forward_s[-1] + cost.backward_s[-1] for cost in costs]
        coarse = len(costs) > SEARCH.items
        self._small = sum(self._seconds) / SEARCH.items if coarse else -1.0

    @cached_property
    def _keys(self) -> list[Hashable]:
        """Per operator what it costs."""
        named = self._cost.parameters
        return [
            (
                (cost.forward_s, cost.backward_s, cost.kept_bytes),
                tuple((named[name].nbytes, named[name].trainable) for name in op.parameters),
            )
            for op, cost in zip(self._cost.graph.ops, self._cost.profile.costs, strict=True)
        ]

    def chain(self, node: Node, below: int) -> Chain:
        """The chain of a part that has so many items below it."""
        cuts = [below]
        items: list[int | Block] = []
        masks: list[int] = []
        for run in reversed(list(self.runs(_flat(node)))):
            only = run[0]
            if len(run) == 1 and isinstance(only, Parallel) and not self._is_small(run):
                block = self._block(only, cuts[-1])
                items.append(block)
                cuts.append(max(branch.below[0] for branch in block.branches))
            else:
                items.append(next(operators(only)))
                cuts.append(cuts[-1] + 1)
            masks.append(sum(_mask(node) for node in run))
        row = NestedSets.row(self._cost, masks[::-1])
        return Chain(tuple(reversed(items)), row, tuple(reversed(cuts)))

    def runs(self, nodes: Iterable[Node]) -> Iterator[list[Node]]:
        """Neighbours that may be one item, each as long as it stays small."""
        run: list[Node] = []
        seconds = 0.0
        for node in nodes:
            more = sum(self._seconds[op] for op in operators(node)) if self._small >= 0 else 0.0
            if run and (self._small < 0 or seconds + more > self._small):
                yield run
                run, seconds = [], 0.0
            run.append(node)
            seconds += more
        if run:
            yield run

    def _is_small(self, run: Sequence[Node]) -> bool:
        return sum(self._seconds[op] for node in run for op in operators(node)) <= self._small

    def _block(self, node: Parallel, below: int) -> Block:
        branches = [
            run[0] if len(run) == 1 else Parallel(tuple(run)) for run in self.runs(node.children)
        ]
        classes: list[int] = []
        ordered: list[Node] = []
        for group in self._alike(branches):
            classes += [len(classes)] * len(group)
            ordered += group
        return Block(
            tuple(self.chain(child, below) for child in ordered),
            tuple(classes),
            NestedSets.row(self._cost, [_mask(child) for child in ordered]),
        )

    def _alike(self, branches: Sequence[Node]) -> list[list[Node]]:
        """Branches that are the same, in the order of the first of each kind."""
        # Comparing costs is quick, and mostly enough to tell branches apart.
        costs = [tuple(self._keys[op] for op in operators(branch)) for branch in branches]
        often = Counter(costs)
        alike: dict[Hashable, list[Node]] = {}
        for place, (branch, key) in enumerate(zip(branches, costs, strict=True)):
            same: Hashable = place
            if often[key] > 1:
                same = key, signature(self._cost.graph, branch, self._keys)
            alike.setdefault(same, []).append(branch)
        return list(alike.values())


def _flat(node: Node) -> list[Node]:
    """Children in series, those of a nested series in its place."""
    if not isinstance(node, Series):
        return [node]
    return [leaf for child in node.children for leaf in _flat(child)]


def _mask(node: Node) -> int:
    return sum(1 << op for op in operators(node))
