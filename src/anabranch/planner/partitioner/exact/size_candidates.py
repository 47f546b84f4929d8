"""Candidates of one micro-batch size from all partitions of a graph.

- The front of longest period and depth: per depth the least period, once with the all-reduce spread
  over the micro-batches, once without it, the all-reduce held to about that of the first. Shallower
  plans that are slower by no more than ``EXACT.hopeless`` are candidates too.
- In small problems, the front of longest period and shortest way through a plan, and the least step
  for deep warm-up (``exact.paths``): with few micro-batches these count as much.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cached_property
from itertools import chain

import numpy as np

from anabranch.planner.partitioner.exact.partition_programme import (
    PartitionProgramme,
    PartitionSolution,
)
from anabranch.planner.partitioner.exact.paths import ShortestPath
from anabranch.planner.partitioner.exact.prices import LatticeWeights, PricedStages
from anabranch.planner.partitioner.limits import EXACT, SEARCH
from anabranch.planner.toolkit.assemble import Candidate
from anabranch.planner.toolkit.parts import Part, edges
from anabranch.planner.toolkit.prices import Bound
from anabranch.planner.toolkit.problem import Problem


class SizeCandidates:
    """One micro-batch size of a problem."""

    def __init__(self, problem: Problem, weights: LatticeWeights, microbatch_size: int) -> None:
        self._devices = problem.cost.cluster.num_devices
        self._prices = problem.prices(microbatch_size)
        self._weights = weights
        self._assembler = problem.assembler(microbatch_size)
        self._seen: set[frozenset[Part]] = set()
        self._spread: list[list[Part]] = []

    @cached_property
    def _reach(self) -> PartitionProgramme:
        heights = min(self._devices, len(self._weights.atoms))
        priced = PricedStages.of(self._weights, self._prices, heights)
        return PartitionProgramme(self._weights, priced, heights=heights)

    @cached_property
    def least_step_s(self) -> float:
        """No step is shorter: all work shared out evenly, and no less than the longest operator."""
        cost, work, longest = self._prices.cost, float("inf"), float("inf")
        for mode in self._prices.modes:
            seconds = sum(cost.op_seconds(self._prices.samples(mode.replicas), mode.tensor))
            work = min(work, float(np.sum(seconds)) * mode.devices)
            longest = min(longest, float(np.max(seconds)))
        return self._prices.num_microbatches * max(work / self._devices, longest)

    def likeliest(self, give_up: float) -> Candidate | None:
        """The candidate that looks best, if its step may be shorter than ``give_up`` seconds."""
        if self.least_step_s > give_up:
            return None
        bound = Bound(give_up / self._prices.num_microbatches)
        self._spread = sorted(self.front(bound), key=self._rough_step_s)
        return next(self._assembled(self._spread), None)

    def candidates(self, give_up: float) -> Iterator[Candidate]:
        """Further candidates whose step may be shorter than ``give_up`` seconds."""
        bound = Bound(give_up / self._prices.num_microbatches)
        reduce_s = SEARCH.reduce_share * give_up / EXACT.hopeless
        for parts in chain(self._spread, self.shortest(bound)):
            reduce_s = max(
                reduce_s, SEARCH.reduce_factor * max(map(self._assembler.prices.reduce_s, parts))
            )
            yield from self._assembled([parts])
        bound = replace(bound, spread=False, reduce_s=reduce_s)
        yield from self._assembled(chain(self.front(bound), self.shortest(bound)))

    def _rough_step_s(self, parts: list[Part]) -> float:
        """The longest period for all micro-batches but one, and the longest way for that."""
        prices = self._assembler.prices
        longest = [prices.period_s(part) for part in parts]
        slowest = max(longest)
        # The stages come in topological order.
        for x, y in sorted(edges(prices, parts), reverse=True):
            longest[x] = max(longest[x], longest[y] + prices.period_s(parts[x]))
        return (self._prices.num_microbatches - 1) * slowest + max(longest)

    def _assembled(self, found: Iterable[list[Part]]) -> Iterator[Candidate]:
        for parts in found:
            key = frozenset(parts)
            if key not in self._seen:
                self._seen.add(key)
                candidate = self._assembler.assemble(parts)
                if candidate is not None:
                    yield candidate

    def front(self, bound: Bound) -> Iterator[list[Part]]:
        """The plans of least period per depth, within a bound: the quickest and deepest first.

        Of equal periods only the shallowest plan. Large depths are looked at in steps.
        """
        periods = self._reach.priced.periods(bound)
        top = self._reach.solve(bound)
        caps = np.flatnonzero(top.devices <= self._devices)
        if not len(caps):
            return
        # Per cap, the greatest place known to be too small and the least known to do.
        low = np.full(self._reach.heights, -1)
        high = np.full(self._reach.heights, len(periods) - 1)
        found = dict.fromkeys(caps.tolist(), top)
        for cap in (cap for cap in reversed(caps.tolist()) if cap in self._steps):
            while high[cap] - low[cap] > 1:
                middle = int(low[cap] + high[cap]) // 2
                answer = self._reach.solve(replace(bound, period_s=float(periods[middle])))
                enough = answer.devices <= self._devices
                low[~enough] = np.maximum(low[~enough], middle)
                for place in np.flatnonzero(enough & (middle < high)).tolist():
                    high[place], found[place] = middle, answer
            if cap == caps[-1]:
                yield found[cap].parts(self._shallowest(found[cap]))
        shown = high[caps[-1]]
        for cap in (cap for cap in reversed(caps.tolist()) if cap in self._steps):
            if high[cap] > shown:
                shown = high[cap]
                yield found[cap].parts(self._shallowest(found[cap]))

    def _shallowest(self, found: PartitionSolution) -> int:
        return int(np.flatnonzero(found.devices <= self._devices)[0])

    @cached_property
    def _steps(self) -> set[int]:
        """Largest heights that are looked at: the greatest, all small ones, then by a quarter."""
        heights = self._reach.heights
        steps = [heights - 1, 0]
        while steps[-1] < heights - 1:
            steps.append(steps[-1] + 1 + steps[-1] // 8 * steps[-1] // 4)
        return set(steps)

    def shortest(self, bound: Bound) -> Iterator[list[Part]]:
        """Plans of least step for deep warm-up; then the front of period and way through a plan."""
        if len(self._weights.lattice.below) * self._devices**2 > EXACT.path_states:
            return
        periods = self._reach.priced.periods(bound)
        count = len(periods)
        for _ in range(EXACT.periods):
            if not len(periods):
                return
            within = replace(bound, period_s=float(periods[-1]))
            path = ShortestPath(self._reach, within, self._devices)
            if not path.found:
                return
            if len(periods) == count and (parts := path.balanced(self._prices.num_microbatches)):
                yield parts[::-1]
            yield list(path.parts())
            # Whatever is quicker than this plan has a longer way, or it would have been found.
            periods = periods[: np.searchsorted(periods, path.period_s * (1 - 1e-9))]
