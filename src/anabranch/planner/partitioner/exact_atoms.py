"""Operators that need not be told apart by a search that is exact: ``partitioner.exact``.

Profiles name operators that cost nothing: inputs, reshapes, one tensor out of a tuple. Each that may
lie in any of several stages multiplies the downsets: a GNMT of 48 operators of which 21 compute has
7,874 of them. A *free* operator (or group of such) has no seconds and no parameters. Moving it

    up     into the stage of its first reader, if it reads no more bytes than it makes
    down   into the stage of its one producer, if all who read the same value are free and
           together make no more bytes than that value has

makes no stage slower, whatever the stages are, and closes no circle of stages::

    ids ---> embed          lstm ---> [0] ---> dropout          (ids embed)   (lstm [0] [1]) ...
                               +----> [1]

What a free operator keeps for its backward moves with it, so in memory (not in the period) the
search is exact only up to those bytes.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

from anabranch.cost import CostModel
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
        groups = _merged(cost.graph, groups, moves)


def quotient(graph: OpGraph, groups: Sequence[int]) -> OpGraph:
    """The graph of groups of operators.

    Args:
        graph: the graph of the operators.
        groups: bit masks, in topological order.

    Returns:
        Operator g stands for the group g; values that stay inside a group are gone.
    """
    home = _home(groups)
    values = []
    for value in graph.values:
        made = home.get(value.producer, BATCH)
        read = tuple(sorted({home[c] for c in value.consumers} - {made}))
        if made != BATCH and read:
            values.append(Value(made, read, value.nbytes, value.batched, value.grad))
    ops = tuple(Op(f"group {g}") for g in range(len(groups)))
    return OpGraph(ops, tuple(values), name=graph.name)


def _home(groups: Sequence[int]) -> dict[int, int]:
    return {op: g for g, mask in enumerate(groups) for op in bits(mask)}


def _is_free(cost: CostModel, op: int) -> bool:
    return not any(
        cost.parameter_bytes([op], tensor=tensor)
        or any(cost.costs(tensor)[op].forward_s)
        or any(cost.costs(tensor)[op].backward_s)
        for tensor in cost.tensor_degrees
    )


def _merged(
    graph: OpGraph, groups: Sequence[int], moves: Sequence[tuple[int, int]]
) -> tuple[int, ...]:
    """The groups with the first of each pair put into the second, in topological order again."""
    masks = dict(enumerate(groups))
    for moved, into in moves:
        masks[into] |= masks.pop(moved)
    left = list(masks.values())
    home = _home(left)
    pairs = {(home[a], home[b]) for a, b in graph.edges if home[a] != home[b]}
    waits = [0] * len(left)
    for _, b in pairs:
        waits[b] += 1
    ready = [(mask & -mask, g) for g, mask in enumerate(left) if not waits[g]]
    heapq.heapify(ready)
    order = []
    while ready:
        g = heapq.heappop(ready)[1]
        order.append(left[g])
        for b in (b for a, b in pairs if a == g):
            waits[b] -= 1
            if not waits[b]:
                heapq.heappush(ready, (left[b] & -left[b], b))
    assert len(order) == len(left), "moves close no circle"
    return tuple(order)


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
            _sum(each for g in readers for each in makes[g]), _sum([value])
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
