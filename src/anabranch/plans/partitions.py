"""Partitions of a small model into stages."""

from __future__ import annotations

from collections.abc import Iterator

from anabranch.cost import CostModel
from anabranch.graph.digraph import topological_order
from anabranch.plans.edges import mask_edges
from anabranch.plans.stages import successors


def partitions(cost: CostModel) -> Iterator[tuple[tuple[int, ...], set[tuple[int, int]]]]:
    """Generate every partition of the operators with an acyclic stage graph.

    Yields:
        Bit masks in topological order, and the stage edges. A part of such a partition is convex,
        or a path that leaves it and comes back would be a cycle.
    """
    n = len(cost.graph)

    def extend(i: int, parts: list[int]) -> Iterator[list[int]]:
        if i == n:
            yield parts
            return
        for s in range(len(parts)):
            yield from extend(i + 1, [*parts[:s], parts[s] | 1 << i, *parts[s + 1 :]])
        yield from extend(i + 1, [*parts, 1 << i])

    for masks in extend(0, []):
        pairs = mask_edges(masks, cost.graph)
        order = topological_order(successors(len(masks), pairs), int)
        if len(order) == len(masks):
            at = {s: k for k, s in enumerate(order)}
            yield tuple(masks[s] for s in order), {(at[x], at[y]) for x, y in pairs}
