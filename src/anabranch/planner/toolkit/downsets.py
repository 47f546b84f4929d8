"""Downsets of a graph: the states that a run of the model, operator after operator, can be in.

A downset (or ideal) holds, with every operator, whatever that operator depends on. Every convex set
is the difference of two nested ones, so a chain of them cuts the model into stages of any shape::

    a --> b1 --> b2 --+        {}  a  a,b1  a,b1,b2                     all but d   all
      |               +--> d             a,c1  a,b1,c1  (a,b1,b2,c1)
      +-> c1 ---------+        size 0  1  2          3          4             5

A chain of n operators has n + 1 downsets, k chains of n side by side (n + 1) ** k, so callers set a
budget. Without its last operator (in topological order) a downset is another one, its only parent,
so each but the empty one is found once. Time O(N * out-degree) for N downsets.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from anabranch.cost.nested_sets import Pairs, run_starts
from anabranch.errors import BudgetError
from anabranch.graph.opgraph import OpGraph, bits


def downsets(graph: OpGraph, budget: int) -> list[int]:
    """Return all downsets of a graph as bit masks.

    Returns:
        Ascending by number of operators, those of one size ascending as numbers; the first is
        empty, the last the whole graph.

    Raises:
        BudgetError: if there are more than ``budget``.
    """
    sources = 0
    for i, needed in enumerate(graph.predecessors):
        sources |= (not needed) << i
    complete: list[int] = []
    # (downset, operators that may be added next and come after all of its own).
    level = [(0, sources)]
    while level:
        level.sort()
        complete += [downset for downset, _ in level]
        following: list[tuple[int, int]] = []
        for child in _children(graph, level):
            following.append(child)
            count = len(complete) + len(following)
            if count > budget:
                raise BudgetError(
                    f"{graph.name or 'the model'} has at least {count:,} downsets of its "
                    f"{len(graph)} operators, more than the budget of {budget:,}, and their number "
                    "grows exponentially with its branches; capture it in coarser operators, take "
                    "planner graphpipe, which needs no downsets, put the operators in a row where "
                    "the planner offers it, or allow a larger budget"
                )
        level = following
    return complete


def nested_pairs(graph: OpGraph, masks: Sequence[int], budget: int) -> Pairs:
    """Return all pairs of downsets of which the upper one contains the lower one.

    Args:
        masks: downsets, ascending by size.

    Raises:
        BudgetError: if there are more than ``budget``.
    """
    starts = run_starts(np.array([mask.bit_count() for mask in masks]))
    width = -(-len(graph) // 64) * 8
    raw = b"".join(mask.to_bytes(width, "little") for mask in masks)
    words = np.frombuffer(raw, dtype=np.uint64).reshape(len(masks), -1)
    columns = [np.ascontiguousarray(column) for column in words.T]
    above: list[NDArray[np.int32]] = []
    count = 0
    for start, stop in pairwise([*starts.tolist(), len(masks)]):
        for lower in range(start, stop):
            above.append(_supersets(columns, lower, stop))
            count += len(above[-1])
            if count > budget:
                raise BudgetError(
                    f"{graph.name or 'the model'} has {len(masks):,} downsets and at least "
                    f"{count:,} nested pairs of them, more than the budget of {budget:,} pairs; "
                    "capture it in coarser operators, take planner graphpipe, put the operators "
                    "in a row (linear=True), or allow more pairs"
                )
    lengths = [len(upper) for upper in above]
    return Pairs(np.repeat(np.arange(len(masks), dtype=np.int32), lengths), np.concatenate(above))


def _supersets(columns: Sequence[NDArray[np.uint64]], lower: int, first: int) -> NDArray[np.int32]:
    """Return the indices from ``first`` on of downsets that contain the one at ``lower``."""
    supersets = np.flatnonzero(columns[0][first:] & columns[0][lower] == columns[0][lower])
    for column in columns[1:]:
        supersets = supersets[column[first:][supersets] & column[lower] == column[lower]]
    return (supersets + first).astype(np.int32)


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
