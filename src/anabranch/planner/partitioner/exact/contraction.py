"""Operators that a search over all partitions need not, or cannot, tell apart.

Operators that cost nothing (inputs, reshapes, one tensor of a tuple) multiply the downsets. A
*free* operator, or group of such, has no seconds and no parameters. Moving it

    up     into the stage of its first reader, if it reads no more bytes than it makes
    down   into the stage of its one producer, if all who read the same value are free and
           together make no more bytes than that value has

makes no stage slower, whatever the stages are, and closes no circle of stages::

    ids ---> embed          lstm ---> [0] ---> dropout          (ids embed)   (lstm [0] [1]) ...
                               +----> [1]

What a free operator keeps for its backward moves with it, so in memory (not in the period) the
search is exact only up to those bytes.

Where the downsets are too many all the same, neighbours become one, the lightest pair first.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence

from anabranch.cost import CostModel
from anabranch.graph.digraph import topological_order
from anabranch.graph.opgraph import BATCH, Op, OpGraph, Value, bits

_Bytes = tuple[float, float, float, float]
"""Of values: per sample, fixed, and of their gradients likewise."""


def atoms(cost: CostModel) -> tuple[int, ...]:
    """Sets of operators that some best plan has in one stage, as bit masks, topologically ordered.

    Time: one pass over the graph per merge.
    """
    free = sum(1 << i for i in range(len(cost.graph)) if _is_free(cost, i))
    groups = tuple(1 << i for i in range(len(cost.graph)))
    while True:
        graph = quotient(cost.graph, groups)
        moves = _moves(graph, [mask & ~free == 0 for mask in groups])
        if not moves:
            return groups
        masks = dict(enumerate(groups))
        for moved, into in moves:
            masks[into] |= masks.pop(moved)
        groups = ordered(cost.graph, masks.values())


def merged(
    cost: CostModel, groups: Sequence[int], enough: Callable[[tuple[int, ...]], bool]
) -> tuple[int, ...]:
    """Groups with neighbours put together, the lightest first, until ``enough`` of them are."""
    merging = _Merging(cost, groups)
    while not enough(result := ordered(cost.graph, merging.masks.values())):
        # A few at a time: asking may take longer than merging.
        for _ in range(1 + len(result) // 16):
            merging.merge_lightest()
    return result


def quotient(graph: OpGraph, groups: Sequence[int]) -> OpGraph:
    """The graph of groups: operator g stands for group g; values inside a group are gone."""
    home = _home(groups)
    values = []
    for value in graph.values:
        made = home.get(value.producer, BATCH)
        read = tuple(sorted({home[c] for c in value.consumers} - {made}))
        if made != BATCH and read:
            values.append(Value(made, read, value.nbytes, value.batched, value.grad))
    ops = tuple(Op(f"group {g}") for g in range(len(groups)))
    return OpGraph(ops, tuple(values), name=graph.name)


def ordered(graph: OpGraph, groups: Iterable[int]) -> tuple[int, ...]:
    """Groups in topological order; there must be one."""
    left = list(groups)
    home = _home(left)
    readers: dict[int, set[int]] = {g: set() for g in range(len(left))}
    for a, b in graph.edges:
        if home[a] != home[b]:
            readers[home[a]].add(home[b])
    order = topological_order(readers, lambda g: left[g] & -left[g])
    assert len(order) == len(left), "groups wait for each other in a circle"
    return tuple(left[g] for g in order)


def _home(groups: Sequence[int]) -> dict[int, int]:
    return {op: g for g, mask in enumerate(groups) for op in bits(mask)}


def _is_free(cost: CostModel, op: int) -> bool:
    return not any(
        cost.parameter_bytes([op], tensor=tensor)
        or any(cost.costs(tensor)[op].forward_s)
        or any(cost.costs(tensor)[op].backward_s)
        for tensor in cost.tensor_degrees
    )


def _moves(graph: OpGraph, free: Sequence[bool]) -> list[tuple[int, int]]:
    """Free groups with the groups that take them, one value or one group at a time."""
    reads: list[list[Value]] = [[] for _ in free]
    makes: list[list[Value]] = [[] for _ in free]
    for value in graph.values:
        makes[value.producer].append(value)
        for g in value.consumers:
            reads[g].append(value)
    for g in (g for g, costs_nothing in enumerate(free) if costs_nothing):
        first = _first_reader(graph, g)
        made = _sum(makes[g])
        alone = graph.successors[g].bit_count() == 1 or not any(made)
        if first is not None and alone and _at_most(_sum(reads[g]), made):
            return [(g, first)]
    for value in graph.values:
        readers = value.consumers
        if all(free[g] and len(reads[g]) == 1 for g in readers) and _at_most(
            _sum(made for g in readers for made in makes[g]), _sum([value])
        ):
            return [(g, value.producer) for g in readers]
    return []


def _first_reader(graph: OpGraph, g: int) -> int | None:
    """The reader that all other readers depend on."""
    readers = graph.successors[g]
    if not readers:
        return None
    first = next(bits(readers))
    others = readers & ~(1 << first)
    return first if others & ~graph.descendants[first] == 0 else None


def _sum(values: Iterable[Value]) -> _Bytes:
    sums = [0.0] * 4
    for value in values:
        kind = 0 if value.batched else 1
        sums[kind] += value.nbytes
        sums[kind + 2] += value.nbytes * value.grad
    return sums[0], sums[1], sums[2], sums[3]


def _at_most(some: _Bytes, others: _Bytes) -> bool:
    return all(a <= b for a, b in zip(some, others, strict=True))


class _Merging:
    """Groups that are put together along edges, the lightest pair first.

    Two groups may be if the edge is the only way from one to the other; groups between which there
    is none only once no such edge is left.

    Attributes:
        masks: the groups by number; a merged one gets a new number.
    """

    def __init__(self, cost: CostModel, groups: Sequence[int]) -> None:
        graph = quotient(cost.graph, groups)
        forward, backward = cost.op_seconds(cost.profile.samples[0])
        seconds = forward + backward
        self.masks = dict(enumerate(groups))
        self._seconds = {g: float(seconds[list(bits(m))].sum()) for g, m in self.masks.items()}
        self._after = {g: set(bits(graph.successors[g])) for g in self.masks}
        self._before = {g: set(bits(graph.predecessors[g])) for g in self.masks}
        self._edges = [(self._together(a, b), a, b) for a, b in graph.edges]
        heapq.heapify(self._edges)
        self._next = len(groups)

    def merge_lightest(self) -> None:
        """Merge one pair, if there are two groups."""
        while self._edges:
            _, a, b = heapq.heappop(self._edges)
            if b in self._after.get(a, ()) and not self._is_roundabout(a, b):
                self._merge(a, b)
                return
        if len(self.masks) > 1:
            a, b = sorted(self.masks, key=lambda g: (self._seconds[g], g))[:2]
            self._merge(a, b)

    def _together(self, a: int, b: int) -> float:
        return self._seconds[a] + self._seconds[b]

    def _is_roundabout(self, a: int, b: int) -> bool:
        """Whether there is a way from a to b besides the edge."""
        waiting = [g for g in self._after[a] if g != b]
        seen = set(waiting)
        while waiting:
            g = waiting.pop()
            if g == b:
                return True
            further = self._after[g] - seen
            seen |= further
            waiting += further
        return False

    def _merge(self, a: int, b: int) -> None:
        new, self._next = self._next, self._next + 1
        self.masks[new] = self.masks.pop(a) | self.masks.pop(b)
        self._seconds[new] = self._together(a, b)
        for these, those in ((self._after, self._before), (self._before, self._after)):
            around = (these.pop(a) | these.pop(b)) - {a, b}
            these[new] = around
            for g in around:
                those[g] -= {a, b}
                those[g].add(new)
        for g in self._after[new]:
            heapq.heappush(self._edges, (self._together(new, g), new, g))
        for g in self._before[new]:
            heapq.heappush(self._edges, (self._together(new, g), g, new))
