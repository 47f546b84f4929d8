"""Downsets of a graph: all the states that a run of the model, operator after operator, can be in.

A downset (or ideal) holds, with every operator, whatever that operator depends on. Two nested
downsets enclose a convex set, and every convex set is the difference of two, so a chain of
downsets cuts the model into stages of any shape::

    a --> b1 --> b2 --+        {}  a  a,b1  a,b1,b2                     all but d   all
      |               +--> d             a,c1  a,b1,c1  (a,b1,b2,c1)
      +-> c1 ---------+        size 0  1  2          3          4             5

A chain of n operators has n + 1 of them, k chains of n side by side (n + 1) ** k: 7 branches of 4
operators have 78,000, 7 of 8 nearly 5 million. So whoever asks for them states a budget.

Each is found once: without its last operator (in the order of the graph, which is topological) a
downset is still a downset, so every one but the empty has one parent. Time O(N * out-degree)
operations on bit masks for N downsets.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from anabranch.errors import BudgetError
from anabranch.graph.opgraph import OpGraph, bits

MOST_DOWNSETS = 100_000
"""Downsets that are listed unless the caller says otherwise; some MB and a tenth of a second."""


def downsets(graph: OpGraph, budget: int = MOST_DOWNSETS) -> list[int]:
    """All downsets of a graph as bit masks.

    Args:
        graph: its operators are the bits.
        budget: downsets to list at most.

    Returns:
        Ascending by number of operators, those of one size ascending as numbers; the first is
        empty, the last the whole graph.

    Raises:
        ValueError: if the budget is less than 1.
        BudgetError: if there are more than ``budget``.
    """
    if budget < 1:
        raise ValueError(f"a budget of {budget} downsets; at least 1 is needed")
    sources = 0
    for i, needed in enumerate(graph.predecessors):
        sources |= (not needed) << i
    found: list[int] = []
    # Per downset, the operators that may come next and stand behind all of its own.
    level = [(0, sources)]
    while level:
        level.sort()
        found += [downset for downset, _ in level]
        following: list[tuple[int, int]] = []
        for child in _children(graph, level):
            following.append(child)
            if len(found) + len(following) > budget:
                raise _too_many(graph, len(found) + len(following), budget)
        level = following
    return found


def prefixes(order: Sequence[int]) -> list[int]:
    """The downsets of operators in a row, ascending by size: one more than there are operators."""
    result = [0]
    for op in order:
        result.append(result[-1] | 1 << op)
    return result


def _children(graph: OpGraph, level: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    needed, readers = graph.predecessors, graph.successors
    for downset, ready in level:
        while ready:
            low = ready & -ready
            ready ^= low
            child = downset | low
            further = ready
            for j in bits(readers[low.bit_length() - 1]):
                if needed[j] & ~child == 0:
                    further |= 1 << j
            yield child, further


def _too_many(graph: OpGraph, count: int, budget: int) -> BudgetError:
    return BudgetError(
        f"{graph.name or 'the model'} has at least {count:,} downsets of its {len(graph)} "
        f"operators, more than the budget of {budget:,}, and their number grows exponentially "
        "with its branches; capture it in coarser operators, take planner graphpipe, which needs "
        "no downsets, put the operators in a row where the planner offers it, or allow a larger "
        "budget"
    )
