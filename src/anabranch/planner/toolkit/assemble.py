"""Stage graphs of parts: devices that are left put to use, the stages in order, and their places.

While devices are left, the stage with the longest period that can use some gets more replicas
(twice as many, else one more) if that shortens its period, or is cut in two; if nothing helps, the
change that does least harm. Where many are left, the stages with the most compute per device come
first in a second try. Where neither ends on exactly all devices, the replicas of all stages are
looked at together: 3 operators on 7 devices with micro-batches of 3 samples need 3, 3 and 1.

Of several results that with the least outline is first: ``(M - 1) * longest period + longest way``
for M micro-batches, the way being the sum of periods on a path. It knows nothing of where the
devices are: ``toolkit.place`` gives them out in several ways, and the simulator decides.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from anabranch.graph.digraph import topological_order
from anabranch.planner.toolkit.parts import Part, PartPrices, edges, fits, heights, successors
from anabranch.planner.toolkit.place import placements
from anabranch.plans.stages import Stage, StageGraph


@dataclass(frozen=True)
class AssemblyLimits:
    """Tuned numbers of the assembler.

    Attributes:
        many_left: if more than this share of the devices is left, they are given out in two ways.
        cuts: places at which a stage may be cut: those where the compute of both is most even.
    """

    many_left: float = 0.25
    cuts: int = 8


LIMITS = AssemblyLimits()


@dataclass(frozen=True)
class Assembler:
    """Turns parts into stage graphs; stages that would not fit recompute where the prices allow it.

    Attributes:
        order: operators, branch after branch.
        chained: every stage waits for the one before it, as in a sequential pipeline.
    """

    prices: PartPrices
    order: tuple[int, ...]
    max_replicas: int
    chained: bool = False

    def assemble(self, parts: Sequence[Part]) -> Candidate | None:
        """A stage graph of these parts on all devices; None if there is none in memory."""
        return min(self.assemblies(parts), key=lambda candidate: candidate.outline_s, default=None)

    def assemblies(self, parts: Sequence[Part]) -> Iterator[Candidate]:
        """Stage graphs of these parts, per way to give out the devices that are left those of all
        placements.
        """
        total = self.prices.cost.cluster.num_devices
        left = total - sum(part.devices for part in parts)
        ranks = (
            [self._by_period]
            if left <= LIMITS.many_left * total
            else [self._by_period, self._by_work]
        )
        some = False
        for rank in ranks:
            spread = self._use_rest(list(parts), left, rank)
            for found in self._finish(spread) if spread is not None else ():
                some = True
                yield found
        if left and not some:
            shared = self._shared_out(parts)
            yield from self._finish(shared) if shared is not None else ()

    def _finish(self, parts: Sequence[Part]) -> Iterator[Candidate]:
        """Stage graphs of parts that use all devices; none if they do not fit."""
        stages, pairs = self.arrange(parts)
        stages = self._slimmed(stages, pairs)
        if fits(self.prices, stages, pairs):
            outline_s = self._outline_s(stages, pairs)
            height = heights(len(stages), pairs)
            sizes = self.prices.cost.cluster.group_sizes
            shapes = [(part.devices, part.tensor) for part in stages]
            for devices in placements(shapes, height, sizes):
                yield Candidate(stage_graph(self.prices, stages, devices, pairs), outline_s)

    def _outline_s(self, parts: Sequence[Part], pairs: set[tuple[int, int]]) -> float:
        periods = [self.prices.period_s(part) for part in parts]
        way = list(periods)
        for x, y in sorted(pairs, reverse=True):
            way[x] = max(way[x], way[y] + periods[x])
        return (self.prices.microbatch.num_microbatches - 1) * max(periods) + max(way)

    def _slimmed(self, parts: list[Part], pairs: set[tuple[int, int]]) -> list[Part]:
        """The parts, those that do not fit at their heights with recomputation, and without it
        those that have memory for a deep warm-up anyway.
        """
        height = heights(len(parts), pairs)
        return [self._slim(part, h) for part, h in zip(parts, height, strict=True)]

    def _slim(self, part: Part, height: int) -> Part:
        if part.recompute:
            plain = replace(part, recompute=False)
            return plain if self.prices.headroom(plain) >= 2 * height else part
        fits_plainly = self.prices.headroom(part) >= height
        return replace(part, recompute=self.prices.microbatch.recompute and not fits_plainly)

    def _use_rest(
        self, parts: list[Part], left: int, rank: Callable[[Part], float]
    ) -> list[Part] | None:
        """The parts on all devices; None if there are too many or too few devices."""
        # What cannot use any of the devices left to good effect never will, as there will be fewer.
        waiting = [(-rank(part), part.mask, part) for part in parts]
        settled: list[Part] = []
        heapq.heapify(waiting)
        while left > 0:
            if waiting:
                part = heapq.heappop(waiting)[-1]
                after = next(self._changes(part, left, helpful=True), None)
                if after is None:
                    settled.append(part)
                    continue
            else:
                harmless = [(p, a) for p in settled for a in self._changes(p, left, helpful=False)]
                if not harmless:
                    return None
                part, after = min(harmless, key=lambda change: self._longest(change[1]))
                settled.remove(part)
            for changed in after:
                heapq.heappush(waiting, (-rank(changed), changed.mask, changed))
            left -= sum(changed.devices for changed in after) - part.devices
        return [*settled, *(entry[-1] for entry in waiting)] if left == 0 else None

    def _by_period(self, part: Part) -> float:
        return self.prices.period_s(part)

    def _by_work(self, part: Part) -> float:
        return sum(self.prices.compute_s(part)) / part.devices

    def _longest(self, parts: Sequence[Part]) -> float:
        return max(self.prices.period_s(part) for part in parts)

    def _changes(self, part: Part, left: int, *, helpful: bool) -> Iterator[list[Part]]:
        """Ways for a part to use some of the devices left."""
        period = self.prices.period_s(part)
        for replicas in (2 * part.replicas, part.replicas + 1):
            more = replace(part, replicas=replicas)
            possible = more.devices - part.devices <= left and self._may(more)
            possible = possible and self.prices.headroom(more) >= 0
            if possible and (not helpful or self.prices.period_s(more) < period):
                yield [more]
        if part.devices <= left:
            halves = self._halves(part)
            if halves and (not helpful or self._longest(halves) < period):
                yield halves

    def _may(self, part: Part) -> bool:
        return part.replicas <= self.max_replicas and self.prices.microbatch.may(part.replicas)

    def _halves(self, part: Part) -> list[Part]:
        """The part cut in two, each with as many replicas, so that the slower is quickest."""
        fitting = (cut for cut in self._cuts(part) if all(map(self._fits_at_sink, cut)))
        return min(fitting, key=self._longest, default=[])

    def _fits_at_sink(self, part: Part) -> bool:
        return self.prices.headroom(part) >= 0

    def _cuts(self, part: Part) -> Iterator[list[Part]]:
        """Ways to make two stages of a part, each run as the part is."""
        ops = sorted(self.prices.sets.ops(part.mask).tolist(), key=self.position.__getitem__)
        seconds = self.prices.seconds(part)[ops].cumsum()
        longer = np.maximum(seconds[:-1], seconds[-1] - seconds[:-1])
        for count in sorted((np.argsort(longer, kind="stable")[: LIMITS.cuts] + 1).tolist()):
            first = sum(1 << op for op in ops[:count])
            yield [replace(part, mask=first), replace(part, mask=part.mask & ~first)]

    def _shared_out(self, parts: Sequence[Part]) -> list[Part] | None:
        """Stages of the same operators on exactly all devices, the longest period the least.

        Where that cannot be, one is cut in two: one that fits in no way, else the one of most work.
        """
        total = self.prices.cost.cluster.num_devices
        current, pairs = self.arrange(parts)
        while len(current) <= total:
            height = heights(len(current), pairs)
            ways = [self._ways(part, h) for part, h in zip(current, height, strict=True)]
            found = self._exactly(ways, total)
            divisible = [s for s, part in enumerate(current) if part.mask & (part.mask - 1)]
            if found or not divisible:
                return found
            s = min(divisible, key=lambda s: (bool(ways[s]), -self._by_work(current[s])))
            halves = min(self._cuts(current[s]), key=self._longest)
            current, pairs = self.arrange([*current[:s], *halves, *current[s + 1 :]])
        return None

    def _ways(self, part: Part, height: int) -> list[Part]:
        """The part in every mode and number of replicas that fits at this height."""
        prices, total = self.prices.microbatch, self.prices.cost.cluster.num_devices
        ways = [
            replace(part, replicas=replicas, recompute=recompute, tensor=tensor)
            for tensor in prices.tensors
            for replicas in range(1, total // tensor + 1)
            for recompute in (False, True)[: 1 + prices.recompute]
        ]
        return [way for way in ways if self._may(way) and self.prices.headroom(way) >= height]

    def _exactly(self, ways: Sequence[Sequence[Part]], total: int) -> list[Part] | None:
        """One way per stage, on ``total`` devices together, with the least longest period."""
        least = np.full(total + 1, np.inf)
        least[0] = 0.0
        taken = []
        for stage in ways:
            following, chosen = np.full(total + 1, np.inf), np.full(total + 1, -1)
            for i, way in enumerate(stage):
                longest = np.maximum(least[: total + 1 - way.devices], self.prices.period_s(way))
                better = longest < following[way.devices :]
                following[way.devices :][better] = longest[better]
                chosen[way.devices :][better] = i
            least = following
            taken.append(chosen)
        if not np.isfinite(least[total]):
            return None
        result: list[Part] = []
        for stage, chosen in zip(reversed(ways), reversed(taken), strict=True):
            result.append(stage[chosen[total]])
            total -= result[-1].devices
        return result[::-1]

    @cached_property
    def position(self) -> dict[int, int]:
        """Place of every operator in the order."""
        return {op: position for position, op in enumerate(self.order)}

    def arrange(self, parts: Sequence[Part]) -> tuple[list[Part], set[tuple[int, int]]]:
        """Parts in topological order, branch after branch, and the stage edges."""
        place, ops = self.position, self.prices.sets.ops
        key = [min(place[op] for op in ops(part.mask).tolist()) for part in parts]
        pairs = edges(self.prices, parts)
        ordered = topological_order(successors(len(parts), pairs), key.__getitem__)
        assert len(ordered) == len(parts), "convex stages along a series-parallel order are acyclic"
        at = {s: position for position, s in enumerate(ordered)}
        moved = {(at[x], at[y]) for x, y in pairs}
        if self.chained:
            moved |= {(s, s + 1) for s in range(len(parts) - 1)}
        return [parts[s] for s in ordered], moved


def stage_graph(
    prices: PartPrices,
    parts: Sequence[Part],
    devices: Sequence[Sequence[int]],
    pairs: set[tuple[int, int]],
) -> StageGraph:
    """Parts in topological order as stages on these devices."""
    graph, microbatch = prices.cost.graph, prices.microbatch
    return StageGraph(
        tuple(
            Stage(
                graph.names(part.mask),
                tuple(where),
                microbatch.microbatch_size,
                recompute=part.recompute,
                tensor=part.tensor,
            )
            for part, where in zip(parts, devices, strict=True)
        ),
        tuple(sorted(pairs)),
        microbatch.batch_size,
    )


@dataclass(frozen=True)
class Candidate:
    """A stage graph, and roughly its seconds per step."""

    graph: StageGraph
    outline_s: float
