"""From parts to a stage graph: use the devices that are left, order the stages, place them.

A search finds the fewest devices for a bound on the period; every device must have work. So while
devices are left, the stage with the longest period that can use some gets more replicas (twice
as many, else one more) if that shortens its period, or is cut in two; if nothing helps, the
change that does least harm.

Devices are given out in rows: first the stages that need a whole node or more, then the others,
each to the first node with room, so that replicas of a stage lie in one node where possible. Two
orders are tried and the quicker kept: branch after branch, which keeps a branch in a node, and
from the sink backwards, which keeps the last stages of the branches near their join.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from anabranch.graph.opgraph import bits
from anabranch.planner.partitioner.estimate import step_s
from anabranch.planner.partitioner.parts import Part, PartPrices, edges, fits, heights
from anabranch.planner.stages import Stage, StageGraph


@dataclass(frozen=True)
class Assembler:
    """Turns parts into stage graphs.

    Attributes:
        prices: prices the parts.
        order: operators, branch after branch.
        max_replicas: devices per stage at most.
        chained: every stage waits for the one before it, as in a sequential pipeline.
    """

    prices: PartPrices
    order: tuple[int, ...]
    max_replicas: int
    chained: bool = False

    def assemble(self, parts: Sequence[Part]) -> Candidate | None:
        """A stage graph of these parts on all devices; None if there is none in memory."""
        total = self.prices.cost.cluster.num_devices
        spread = self._use_rest(list(parts), total - sum(part.devices for part in parts))
        if spread is None:
            return None
        stages, pairs = self._arrange(spread)
        if not fits(self.prices, stages, pairs):
            return None
        return min(self._place(stages, pairs), key=lambda candidate: candidate.step_s)

    def _use_rest(self, parts: list[Part], left: int) -> list[Part] | None:
        while left > 0:
            better = next(self._changes(parts, left, helpful=True), None)
            change = better or min(
                self._changes(parts, left, helpful=False), key=self._longest, default=None
            )
            if change is None:
                return None
            before, after = change
            parts = [part for part in parts if part != before] + after
            left -= sum(part.devices for part in after) - before.devices
        return parts if left == 0 else None

    def _longest(self, change: tuple[Part, list[Part]]) -> float:
        return max(self.prices.period_s(part) for part in change[1])

    def _changes(
        self, parts: Sequence[Part], left: int, *, helpful: bool
    ) -> Iterator[tuple[Part, list[Part]]]:
        """Ways to use some of the devices left, those for the slowest part first."""
        slowest = sorted(parts, key=lambda part: (-self.prices.period_s(part), part.mask))
        for part in slowest:
            period = self.prices.period_s(part)
            for replicas in (2 * part.replicas, part.replicas + 1):
                more = replace(part, replicas=replicas)
                possible = more.devices - part.devices <= left and self._may(more)
                if possible and (not helpful or self.prices.period_s(more) < period):
                    yield part, [more]
            if part.devices <= left:
                halves = self._halves(part)
                if halves and (not helpful or self._longest((part, halves)) < period):
                    yield part, halves

    def _may(self, part: Part) -> bool:
        size = self.prices.prices.microbatch_size
        within = part.devices <= self.max_replicas and part.replicas <= size
        return within and self.prices.cost.covers(self.prices.prices.samples(part.replicas))

    def _halves(self, part: Part) -> list[Part]:
        """The part cut in two, each with as many replicas, so that the slower is quickest."""
        ops = sorted(bits(part.mask), key=self.order.index)
        first = 0
        cuts = []
        for op in ops[:-1]:
            first |= 1 << op
            cuts.append([replace(part, mask=first), replace(part, mask=part.mask & ~first)])
        return min(cuts, key=lambda halves: self._longest((part, halves)), default=[])

    def _arrange(self, parts: Sequence[Part]) -> tuple[list[Part], set[tuple[int, int]]]:
        """Parts in topological order, branch after branch, and the stage edges."""
        place = {op: position for position, op in enumerate(self.order)}
        key = [min(place[op] for op in bits(part.mask)) for part in parts]
        pairs = edges(self.prices, parts)
        waits = [0] * len(parts)
        for _, y in pairs:
            waits[y] += 1
        ready = [(key[s], s) for s in range(len(parts)) if not waits[s]]
        heapq.heapify(ready)
        ordered: list[int] = []
        while ready:
            _, s = heapq.heappop(ready)
            ordered.append(s)
            for x, y in pairs:
                if x == s:
                    waits[y] -= 1
                    if not waits[y]:
                        heapq.heappush(ready, (key[y], y))
        assert len(ordered) == len(parts), "convex stages along a series-parallel order are acyclic"
        at = {s: position for position, s in enumerate(ordered)}
        moved = {(at[x], at[y]) for x, y in pairs}
        if self.chained:
            moved |= {(s, s + 1) for s in range(len(parts) - 1)}
        return [parts[s] for s in ordered], moved

    def _place(self, parts: Sequence[Part], pairs: set[tuple[int, int]]) -> Iterator[Candidate]:
        height = heights(len(parts), pairs)
        forward = list(range(len(parts)))
        from_sink = sorted(forward, key=lambda s: (height[s], s))
        node = self.prices.cost.cluster.group_sizes[0]
        seen = set()
        for order in (forward, from_sink):
            devices = place([parts[s].devices for s in order], node)
            chosen = [devices[order.index(s)] for s in forward]
            if tuple(map(tuple, chosen)) in seen:
                continue
            seen.add(tuple(map(tuple, chosen)))
            yield Candidate(
                self._stage_graph(parts, chosen, pairs),
                step_s(self.prices, parts, chosen, pairs),
                max(self.prices.period_s(part) for part in parts),
            )

    def _stage_graph(
        self, parts: Sequence[Part], devices: Sequence[Sequence[int]], pairs: set[tuple[int, int]]
    ) -> StageGraph:
        graph = self.prices.cost.graph
        return StageGraph(
            tuple(
                Stage(
                    graph.names(part.mask),
                    tuple(where),
                    self.prices.prices.microbatch_size,
                    recompute=part.recompute,
                    tensor=part.tensor,
                )
                for part, where in zip(parts, devices, strict=True)
            ),
            tuple(sorted(pairs)),
            self.prices.prices.batch_size,
        )


@dataclass(frozen=True)
class Candidate:
    """A stage graph with what its planner thinks of it: estimated step and longest period."""

    graph: StageGraph
    step_s: float
    period_s: float


def place(replicas: Sequence[int], node: int) -> list[list[int]]:
    """Device numbers for stages with these numbers of replicas, in order, on nodes of this size."""
    total = sum(replicas)
    free = [list(range(start, min(start + node, total))) for start in range(0, total, node)]
    result: list[list[int]] = [[] for _ in replicas]
    for s in sorted(range(len(replicas)), key=lambda s: (replicas[s] < node, s)):
        wanted = replicas[s]
        fitting = next((each for each in free if wanted <= len(each) and wanted <= node), None)
        if fitting is not None:
            result[s], fitting[:] = fitting[:wanted], fitting[wanted:]
            continue
        for each in sorted(free, key=lambda each: -len(each)):
            taken = min(wanted - len(result[s]), len(each))
            result[s] += each[:taken]
            each[:] = each[taken:]
        result[s].sort()
    return result
