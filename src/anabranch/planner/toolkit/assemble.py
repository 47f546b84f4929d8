"""Stage graphs of parts: replicas on all devices, topological order, and devices for stages.

Where devices are left, the replicas of all stages are chosen together: on exactly all devices, with
the least longest period, and of these with the least sum of periods. 3 operators on 7 devices with
micro-batches of 3 samples need 3, 3 and 1. Where no numbers add up to all devices, a stage is cut
in two.

The outline of a result is ``(M - 1) * longest period + longest way`` for M micro-batches, the way
being the sum of periods on a path. It knows nothing of where the devices are: ``toolkit.place``
gives them out in several ways, and the simulator decides.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from anabranch.graph.digraph import topological_order
from anabranch.graph.opgraph import bits
from anabranch.planner.toolkit.place import placements
from anabranch.planner.toolkit.prices import MicrobatchPrices, Part
from anabranch.plans.edges import mask_edges
from anabranch.plans.stages import Stage, StageGraph, heights, successors

SUM_WEIGHT = 1e-6
"""Weight of the sum of all periods beside the longest one, so small that it only breaks ties."""


@dataclass(frozen=True)
class Assembler:
    """Turns parts into stage graphs; stages that would not fit recompute where the prices allow it.

    Attributes:
        order: operators, branch after branch.
        chained: every stage waits for the one before it, as in a sequential pipeline.
    """

    prices: MicrobatchPrices
    order: tuple[int, ...]
    max_replicas: int
    chained: bool = False

    def assemble(self, parts: Sequence[Part]) -> Candidate | None:
        """Return a stage graph of these parts on all devices; None if they do not fit."""
        return next(self.assemblies(parts), None)

    def assemblies(self, parts: Sequence[Part]) -> Iterator[Candidate]:
        """Generate stage graphs of these parts, one per placement; none if they do not fit."""
        left = self.prices.cost.cluster.num_devices - sum(part.replicas for part in parts)
        stages, pairs = self.arrange(self.shared_out(parts) if left else parts)
        stages = self._recomputing(stages, pairs)
        if stages and fits(self.prices, stages, pairs):
            outline_s = self._outline_s(stages, pairs)
            for graph in self.placed(stages, pairs):
                yield Candidate(graph, outline_s)

    def placed(self, stages: Sequence[Part], pairs: set[tuple[int, int]]) -> Iterator[StageGraph]:
        """Generate stage graphs of parts in topological order, in all ways of ``toolkit.place``."""
        sizes = self.prices.cost.cluster.group_sizes
        counts = [part.replicas for part in stages]
        for devices in placements(counts, heights(len(stages), pairs), sizes):
            yield stage_graph(self.prices, stages, devices, pairs)

    def _outline_s(self, parts: Sequence[Part], pairs: set[tuple[int, int]]) -> float:
        periods = [self.prices.part_period_s(part) for part in parts]
        way = list(periods)
        for x, y in sorted(pairs, reverse=True):
            way[x] = max(way[x], way[y] + periods[x])
        return (self.prices.num_microbatches - 1) * max(periods) + max(way)

    def _recomputing(self, parts: list[Part], pairs: set[tuple[int, int]]) -> list[Part]:
        """Set recomputation in the parts that do not fit at their heights without it."""
        if not self.prices.recompute:
            return parts
        return [
            part if self.prices.part_headroom(part) >= height else replace(part, recompute=True)
            for part, height in zip(parts, heights(len(parts), pairs), strict=True)
        ]

    def _halves(self, part: Part) -> list[Part]:
        """Cut a part in two of about the same work; replicas and recomputation stay."""
        ops = sorted(bits(part.mask), key=self.position.__getitem__)
        seconds = self.prices.op_seconds(part)[ops].cumsum()
        cut = int(np.maximum(seconds[:-1], seconds[-1] - seconds[:-1]).argmin()) + 1
        first = sum(1 << op for op in ops[:cut])
        return [replace(part, mask=first), replace(part, mask=part.mask & ~first)]

    def shared_out(self, parts: Sequence[Part]) -> list[Part]:
        """Choose replicas of parts on exactly all devices, with the least longest period.

        If no numbers fit, a part is cut in two: one that fits in no mode, else the one with most
        work. Returns no parts if that does not help either.
        """
        total = self.prices.cost.cluster.num_devices
        current, pairs = self.arrange(parts)
        while len(current) <= total:
            height = heights(len(current), pairs)
            most = total - len(current) + 1
            ways = [
                [
                    way
                    for way in self.prices.parts(part.mask, min(most, self.max_replicas))
                    if self.prices.part_headroom(way) >= h
                ]
                for part, h in zip(current, height, strict=True)
            ]
            assigned = on_exactly(total, self.prices, ways)
            divisible = [s for s, part in enumerate(current) if part.mask & (part.mask - 1)]
            if assigned or not divisible:
                return assigned
            s = min(divisible, key=lambda s: (bool(ways[s]), -self.prices.compute_s(current[s])))
            halves = self._halves(current[s])
            current, pairs = self.arrange([*current[:s], *halves, *current[s + 1 :]])
        return []

    @cached_property
    def position(self) -> dict[int, int]:
        """Place of every operator in the order."""
        return {op: position for position, op in enumerate(self.order)}

    def arrange(self, parts: Sequence[Part]) -> tuple[list[Part], set[tuple[int, int]]]:
        """Return parts in topological order, branch after branch, and the stage edges."""
        key = [min(self.position[op] for op in bits(part.mask)) for part in parts]
        pairs = mask_edges([part.mask for part in parts], self.prices.cost.graph)
        ordered = topological_order(successors(len(parts), pairs), key.__getitem__)
        assert len(ordered) == len(parts), "convex stages along a series-parallel order are acyclic"
        at = {s: position for position, s in enumerate(ordered)}
        moved = {(at[x], at[y]) for x, y in pairs}
        if self.chained:
            moved |= {(s, s + 1) for s in range(len(parts) - 1)}
        return [parts[s] for s in ordered], moved


def on_exactly(total: int, prices: MicrobatchPrices, ways: Sequence[Sequence[Part]]) -> list[Part]:
    """Choose a way per stage, on ``total`` devices together, with the least longest period; return
    none if there is no such choice.
    """
    if not all(ways):
        return []
    # Longest period and sum of periods by number of devices. The second half stays infinite, for
    # negative indices.
    longest, together = np.full((2, 2 * total + 1), np.inf)
    longest[0] = together[0] = 0.0
    taken = []
    for stage in ways:
        devices = np.array([way.replicas for way in stage])
        period_s = np.array([prices.part_period_s(way) for way in stage])
        before = np.arange(total + 1)[:, None] - devices
        longer = np.maximum(longest[before], period_s)
        sums = together[before] + period_s
        chosen = np.argmin(longer + SUM_WEIGHT * sums, axis=1)[:, None]
        longest[: total + 1] = np.take_along_axis(longer, chosen, axis=1)[:, 0]
        together[: total + 1] = np.take_along_axis(sums, chosen, axis=1)[:, 0]
        taken.append(chosen[:, 0])
    if longest[total] == np.inf:
        return []
    result: list[Part] = []
    for stage, chosen in zip(reversed(ways), reversed(taken), strict=True):
        result.append(stage[chosen[total]])
        total -= result[-1].replicas
    return result[::-1]


def stage_graph(
    prices: MicrobatchPrices,
    parts: Sequence[Part],
    devices: Sequence[Sequence[int]],
    pairs: set[tuple[int, int]],
) -> StageGraph:
    """Return the stage graph of parts in topological order on these devices."""
    graph = prices.cost.graph
    return StageGraph(
        tuple(
            Stage(
                graph.names(part.mask),
                tuple(where),
                prices.microbatch_size,
                recompute=part.recompute,
            )
            for part, where in zip(parts, devices, strict=True)
        ),
        tuple(sorted(pairs)),
        prices.batch_size,
    )


def fits(prices: MicrobatchPrices, parts: Sequence[Part], pairs: set[tuple[int, int]]) -> bool:
    """Return True if every part has memory for its height."""
    height = heights(len(parts), pairs)
    return all(prices.part_headroom(part) >= h for part, h in zip(parts, height, strict=True))


@dataclass(frozen=True)
class Candidate:
    """A stage graph and its outline, which is roughly the seconds of a step."""

    graph: StageGraph
    outline_s: float
