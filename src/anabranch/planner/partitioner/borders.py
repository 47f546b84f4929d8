"""Single operators cross the borders of stages, where those were found among coarse items.

    [ a b c d ][ e f ]   c, d, e in one item     ->     [ a b c ][ d e f ]

The slowest stage gives an operator to a neighbour, or takes one from it with which traffic ends,
as long as the longer of the two periods gets shorter. Only operators at the border can cross: those
that nothing in their stage follows, or leads to.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice

from anabranch.graph.opgraph import bits
from anabranch.planner.toolkit.parts import Part, PartPrices, edges

MOST_MOVES = 16
"""Moves at most."""

MOST_WAYS = 8
"""Ways for the slowest stage to change that are looked at before each move."""


def moved(prices: PartPrices, parts: Sequence[Part]) -> list[Part]:
    """The parts with borders where the slowest stages are quicker.

    Args:
        prices: prices the parts.
        parts: in topological order.
    """
    result = list(parts)
    for _ in range(MOST_MOVES):
        slowest = max(range(len(result)), key=lambda s: prices.period_s(result[s]))
        period_s = prices.period_s(result[slowest])
        best = min(
            islice(_moves(prices, result, slowest), MOST_WAYS),
            key=lambda move: max(prices.period_s(part) for part in move.values()),
            default=None,
        )
        if best is None or max(prices.period_s(part) for part in best.values()) >= period_s:
            break
        for s, part in best.items():
            result[s] = part
    return result


def _moves(prices: PartPrices, parts: Sequence[Part], s: int) -> Iterator[dict[int, Part]]:
    """Ways for stage s to exchange one operator with a neighbour."""
    graph = prices.cost.graph
    home = [0] * len(graph)
    for place, part in enumerate(parts):
        for op in prices.facts.ops(part.mask).tolist():
            home[op] = place
    # The order of the stages stays topological: what an operator reads is in no later stage than
    # it, what reads it in no earlier one.
    for op in prices.facts.ops(parts[s].mask).tolist():
        later = [home[q] for q in bits(graph.successors[op])]
        earlier = [home[q] for q in bits(graph.predecessors[op])]
        if later and min(later) > s:
            yield from _exchange(prices, parts, s, min(later), op)
        if earlier and max(earlier) < s:
            yield from _exchange(prices, parts, s, max(earlier), op)
    for x, y in edges(prices, parts):
        other = y if x == s else x
        if s in (x, y):
            for op in prices.facts.ops(parts[other].mask).tolist():
                before = all(home[q] <= s for q in bits(graph.predecessors[op]))
                after = all(home[q] >= s for q in bits(graph.successors[op]))
                if before if other == y else after:
                    yield from _exchange(prices, parts, other, s, op)


def _exchange(
    prices: PartPrices, parts: Sequence[Part], source: int, target: int, op: int
) -> Iterator[dict[int, Part]]:
    """The two stages after an operator has changed over, if both are left with some and fit."""
    first = replace(parts[source], mask=parts[source].mask & ~(1 << op))
    second = replace(parts[target], mask=parts[target].mask | 1 << op)
    if first.mask and all(prices.headroom(part) >= 0 for part in (first, second)):
        yield {source: first, target: second}
