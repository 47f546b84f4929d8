"""Chains: the series-parallel decomposition in the form used by Algorithm 1.

A chain is a row of items, each an operator or a block; a block is a set of chains side by side::

    chain   [ stem ][ block ............. ][ head ][ loss ]
                    | chain [ a ][ b ][ c ]|
                    | chain [ d ][ e ]     |

A series decomposition cuts a chain between two items, a parallel one a block between two branches.
Branches with the same ``series_parallel.signature`` are solved once.

A model of more than ``most_items`` operators is made coarser: neighbours in a chain, whole blocks
and neighbouring branches become one item if together they take no more than an equal share of all
compute.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from anabranch.cost import CostModel
from anabranch.cost.nested_sets import NestedSets
from anabranch.graph.opgraph import bits
from anabranch.graph.series_parallel import (
    Leaf,
    Node,
    Parallel,
    Series,
    mask_of,
    operators,
    signature,
)
from anabranch.remembered import remembered


@dataclass(frozen=True, eq=False)
class ParallelBlock:
    """Chains side by side.

    Attributes:
        branches: chains of the branches; equal branches are neighbours and share that of the last.
        places: per branch, operator of its chain -> operator of the branch.
        row: the branches as a row, whose ranges are runs of whole branches.
    """

    branches: tuple[SeriesChain, ...]
    places: tuple[dict[int, int], ...]
    row: NestedSets

    def own(self, mask: int, branch: int) -> int:
        """Map operators of a branch's chain to those of the branch, as bit masks."""
        return sum(1 << self.places[branch][op] for op in bits(mask))


@dataclass(frozen=True, eq=False)
class SeriesChain:
    """Items in series.

    Attributes:
        items: a block, or None for an operator or several operators taken as one.
        row: the items as a row, whose ranges are runs of items.
    """

    items: tuple[ParallelBlock | None, ...]
    row: NestedSets

    def __len__(self) -> int:
        return len(self.items)

    @remembered
    def with_join(self, place: int) -> dict[int, tuple[NestedSets, int]]:
        """Map branches of the block at a place, the last of equal ones, to a row of their items and
        the items behind the block, and the number of their own items. Empty at an operator.
        """
        block, behind = self.items[place], self.row.parts[place + 1 :]
        last = {own: q for q, own in enumerate(block.branches)} if block else {}
        rows = {q: NestedSets.row(self.row.cost, [*b.row.parts, *behind]) for b, q in last.items()}
        return {q: (rows[q], len(branch)) for branch, q in last.items()}


def tree(cost: CostModel, root: Node, most_items: int) -> SeriesChain:
    """Convert a whole decomposition to a chain."""
    return _ChainBuilder(cost, most_items).chain(root)


def line(cost: CostModel, order: Iterable[int], most_items: int) -> SeriesChain:
    """Return the chain of operators in one topological order."""
    return tree(cost, Series(tuple(map(Leaf, order))), most_items)


class _ChainBuilder:
    """Builds chains for one model."""

    def __init__(self, cost: CostModel, most_items: int) -> None:
        self._cost = cost
        costs = cost.profile.costs
        self._work_s = [op.forward_s[-1] + op.backward_s[-1] for op in costs]
        self._small = sum(self._work_s) / most_items if len(costs) > most_items else -1.0

    @cached_property
    def _keys(self) -> list[Hashable]:
        """Cost of each operator, to detect equal branches; tied parameters keep their names."""
        graph, tied = self._cost.graph, [parameter for _, parameter in self._cost.tied]
        named = {p.name: p if p in tied else replace(p, name="-") for p in graph.parameters}
        pairs = zip(self._cost.profile.costs, graph.ops, strict=True)
        return [(costs, tuple(named[name] for name in op.parameters)) for costs, op in pairs]

    def chain(self, node: Node) -> SeriesChain:
        runs = list(self.runs(_flat(node)))
        items = [
            self._block(run[0])
            if isinstance(run[0], Parallel) and self._seconds(run[0]) > self._small
            else None
            for run in runs
        ]
        row = NestedSets.row(self._cost, [sum(map(mask_of, run)) for run in runs])
        return SeriesChain(tuple(items), row)

    def runs(self, nodes: Iterable[Node]) -> Iterator[list[Node]]:
        """Group neighbours into items, each run as long as it stays small."""
        run: list[Node] = []
        seconds = 0.0
        for node in nodes:
            more = self._seconds(node)
            if run and seconds + more > self._small:
                yield run
                run, seconds = [], 0.0
            run.append(node)
            seconds += more
        yield run

    def _seconds(self, node: Node) -> float:
        return sum(self._work_s[op] for op in operators(node))

    def _block(self, node: Parallel) -> ParallelBlock:
        alike: dict[Hashable, list[Node]] = {}
        for run in self.runs(node.children):
            branch = run[0] if len(run) == 1 else Parallel(tuple(run))
            alike.setdefault(signature(self._cost.graph, branch, self._keys), []).append(branch)
        branches, places = list[SeriesChain](), list[dict[int, int]]()
        for same in alike.values():
            branches += [self.chain(same[-1])] * len(same)
            places += [dict(zip(operators(same[-1]), operators(b), strict=True)) for b in same]
        row = NestedSets.row(self._cost, [mask_of(b) for same in alike.values() for b in same])
        return ParallelBlock(tuple(branches), tuple(places), row)


def _flat(node: Node) -> list[Node]:
    """Return children in series, with nested series expanded."""
    if not isinstance(node, Series):
        return [node]
    return [leaf for child in node.children for leaf in _flat(child)]
