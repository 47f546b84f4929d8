"""Series and parallel parts of a graph of operators: the places where it may be cut.

Chains are easy to plan and arbitrary graphs are not (7 branches of 4 operators have 78,000
downsets), so planners work on a tree::

    a --> b1 --> b2 --+                     Series
      |               +--> d                +- Leaf a
      +-> c1 ---------+                     +- Parallel
                                            |  +- Series(Leaf b1, Leaf b2)
                                            |  +- Leaf c1
                                            +- Leaf d

The decomposition is that of the partial order "depends on": Valdes, Tarjan and Lawler, "The
recognition of series parallel digraphs" (1982). An edge that other edges imply does not count.

Two parts are in series if everything in the first precedes everything in the second, and parallel
if nothing in one depends on the other. Where a part is neither (it holds an N: x1 -> y1, x1 -> y2,
x2 -> y2), some order is added: of the cuts at prefixes of a few topological orders, the one that
orders the smallest share of the pairs it separates, then the same again on both sides. A plan for
the graph with the added order is one for the graph without it.

Time: O(n) operations on bit masks of n bits per level of the tree.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

from anabranch.graph.opgraph import BATCH, OpGraph, bits

_OUTSIDE = -2
"""The position of an operator outside the part that a signature describes."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """One operator, by its index."""

    op: int


@dataclass(frozen=True, slots=True)
class Series:
    """At least two parts, each before the next; ``forced``: that order was added."""

    children: tuple[Node, ...]
    forced: bool = False


@dataclass(frozen=True, slots=True)
class Parallel:
    """At least two parts that do not depend on each other, in the order of first operators."""

    children: tuple[Node, ...]


Node: TypeAlias = Leaf | Series | Parallel


def decompose(graph: OpGraph) -> Node:
    """Decompose a graph into a tree of series and parallel parts, whose leaves are all operators.

    No ``Series`` holds a ``Series`` that is not forced, and no ``Parallel`` a ``Parallel``.
    """
    return _decompose(graph, (1 << len(graph)) - 1)


def operators(node: Node) -> Iterator[int]:
    """Generate the operators of a part, branch after branch, in a topological order."""
    if isinstance(node, Leaf):
        yield node.op
    else:
        for child in node.children:
            yield from operators(child)


def mask_of(node: Node) -> int:
    """Return the operators of a part as a bit mask."""
    return sum(1 << op for op in operators(node))


def signature(graph: OpGraph, node: Node, keys: Sequence[Hashable]) -> Hashable:
    """Return a key that is equal for parts that a planner may treat as the same: shape, keys of the
    operators (their costs), and sizes and ends of the values that they read and make.
    """
    order = list(operators(node))
    position = {op: i for i, op in enumerate(order)}
    ends: list[list[Hashable]] = [[] for _ in order]
    for value in graph.values:
        touched = [i for i in (value.producer, *value.consumers) if i in position]
        if not touched:
            continue
        size_and_ends = (
            value.nbytes,
            value.batched,
            value.grad,
            position.get(value.producer, BATCH if value.producer == BATCH else _OUTSIDE),
            tuple(sorted({position.get(consumer, _OUTSIDE) for consumer in value.consumers})),
        )
        ends[position[touched[0]]].append(size_and_ends)
    return (
        _shape(node, position),
        tuple(keys[op] for op in order),
        tuple(tuple(sorted(touching, key=repr)) for touching in ends),
    )


def _shape(node: Node, position: dict[int, int]) -> Hashable:
    if isinstance(node, Leaf):
        return position[node.op]
    return type(node).__name__, tuple(_shape(child, position) for child in node.children)


def _decompose(graph: OpGraph, mask: int) -> Node:
    if mask & (mask - 1) == 0:
        return Leaf(mask.bit_length() - 1)
    parts = _components(graph, mask)
    if len(parts) > 1:
        return Parallel(tuple(_decompose(graph, part) for part in parts))
    parts = _series(graph, mask)
    if len(parts) > 1:
        return Series(tuple(_decompose(graph, part) for part in parts))
    before = _sparsest_cut(graph, mask)
    halves = (_decompose(graph, before), _decompose(graph, mask & ~before))
    # Series in series is one series, wherever in it the order was added.
    children = [half.children if isinstance(half, Series) else (half,) for half in halves]
    return Series((*children[0], *children[1]), forced=True)


def _components(graph: OpGraph, mask: int) -> list[int]:
    """Return parts that do not depend on each other, in the order of their first operators."""
    parts = []
    while mask:
        part, frontier = 0, mask & -mask
        while frontier:
            part |= frontier
            reached = 0
            for i in bits(frontier):
                reached |= graph.ancestors[i] | graph.descendants[i]
            frontier = reached & mask & ~part
        parts.append(part)
        mask &= ~part
    return parts


def _series(graph: OpGraph, mask: int) -> list[int]:
    """Return parts of which each wholly precedes the next."""
    # A cut before operator i is valid if all operators before it are ancestors of all others. In
    # any topological order, a part that wholly precedes the rest is a prefix.
    chosen = list(bits(mask))
    common = mask
    cuts = []
    below = mask
    for i in reversed(chosen):
        below &= ~(1 << i)
        common &= graph.ancestors[i]
        if below and below & ~common == 0:
            cuts.append(below)
    prefixes = [0, *reversed(cuts), mask]
    return [after & ~before for before, after in pairwise(prefixes)]


def _sparsest_cut(graph: OpGraph, mask: int) -> int:
    """Return the prefix that, put before the rest, orders the fewest independent pairs, as a share
    of the pairs that it separates.
    """
    size = mask.bit_count()
    best: tuple[float, int] | None = None
    result = 0
    for order in _orders(graph, mask):
        prefix = added = 0
        for count, i in enumerate(order[:-1], start=1):
            independent = mask & ~(graph.ancestors[i] | graph.descendants[i] | 1 << i)
            added += (independent & ~prefix).bit_count() - (independent & prefix).bit_count()
            prefix |= 1 << i
            separated = count * (size - count)
            if best is None or (added / separated, -separated) < best:
                best, result = (added / separated, -separated), prefix
    return result


def _orders(graph: OpGraph, mask: int) -> Iterator[list[int]]:
    """Generate topological orders: as given, by longest way from a source, and to a sink."""
    chosen = list(bits(mask))
    yield chosen
    early, late = dict.fromkeys(chosen, 0), dict.fromkeys(chosen, 0)
    for i in chosen:
        early[i] = 1 + max((early[j] for j in bits(graph.predecessors[i] & mask)), default=0)
    for i in reversed(chosen):
        late[i] = 1 + max((late[j] for j in bits(graph.successors[i] & mask)), default=0)
    yield sorted(chosen, key=lambda i: (early[i], i))
    yield sorted(chosen, key=lambda i: (-late[i], i))
