"""The search that graphpipe and sequential share: micro-batch sizes, bounds, depths.

For every micro-batch size the least bound on the period is found by bisection, each bound asking
``partitioner.reach`` for the fewest devices. The bottleneck is not the step, though: a step takes
about ``(M - 1) * period + critical path``, and a plan that is a little slower but half as deep may
win.
So three things are done:

- coarsely for every size, the least period with the all-reduce spread over the micro-batches;
- closely for the few sizes with the best estimates, the least period without it, the all-reduce
  held to about that of the coarse plan: nothing is gained by a stage that computes less than the
  slowest and then reduces for longer;
- from there upwards, at looser bounds, the smallest depth that the devices allow.

All of these become candidates, ranked by ``partitioner.estimate``. Every bound that fails raises a
lower limit on the step of its micro-batch size; sizes that cannot come near the best estimate are
left early.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from anabranch.cost import CostModel
from anabranch.planner.partitioner.assemble import Assembler, Candidate
from anabranch.planner.partitioner.chains import Chain, span
from anabranch.planner.partitioner.line import LineFound, LineReach
from anabranch.planner.partitioner.parts import Part, PartPrices
from anabranch.planner.partitioner.prices import Bound, Prices, degrees, microbatch_sizes
from anabranch.planner.partitioner.reach import Reach
from anabranch.planner.partitioner.solved import Found
from anabranch.planner.stages import Stage

COARSE = 0.04
"""Relative distance to the least period with which every micro-batch size is first looked at."""

HOPELESS = 1.2
"""A micro-batch size gets no candidate if its step cannot be within this factor of the best."""

REFINED = 3
"""Micro-batch sizes that are looked at closely: those with the best coarse candidates."""

PROMISING = 1.05
"""They are left as soon as their steps cannot be within this factor of the best."""

REDUCE = 1.25
REDUCE_SHARE = 0.03
"""All-reduces may take this many times the longest of the coarse plan, or this share of a step."""

LOOSER = 1.08
MOST_LOOSER = 6
"""Ratio of the bounds that are tried for smaller depths, and the most of them."""


@dataclass(frozen=True)
class Problem:
    """What is to be planned.

    Attributes:
        cost: prices the operators on the cluster.
        chain: the model.
        order: its operators, branch after branch.
        batch_size: samples of one step.
        max_replicas: devices per stage at most.
        chained: every stage waits for the one before it.
        tolerance: how near to the least period the bisection must come, relative.
    """

    cost: CostModel
    chain: Chain
    order: tuple[int, ...]
    batch_size: int
    max_replicas: int
    chained: bool
    tolerance: float

    def prices(self, microbatch_size: int, limit: int | None = None) -> Prices:
        """Prices at one micro-batch size."""
        most = min(limit or self.cost.cluster.num_devices, self.max_replicas)
        return Prices(
            self.cost,
            self.batch_size,
            microbatch_size,
            degrees(self.cost, microbatch_size, most),
            self.cost.cluster.memory_bytes,
        )

    def reach(self, prices: Prices, limit: int | None = None) -> Reach | LineReach:
        """What searches this model at these prices."""
        limit = limit or self.cost.cluster.num_devices
        if not self.chain.blocks:
            return LineReach(self.chain, prices, heights=min(limit, span(self.chain)))
        return Reach(self.chain, prices, limit=limit, heights=min(limit, span(self.chain)))


def candidates(
    problem: Problem, microbatch_size: int | None, *, known_s: float = float("inf")
) -> list[Candidate]:
    """Candidates for one micro-batch size or all, in no order; empty if nothing fits.

    Args:
        problem: what is to be planned.
        microbatch_size: only this size.
        known_s: a step that is known to be possible, so that worse sizes can be left out.
    """
    sizes = [microbatch_size] if microbatch_size else microbatch_sizes(problem.batch_size)
    searches = [Search(problem, b) for b in sizes if problem.prices(b).degrees]
    least = known_s
    ratio = 1.2
    for search in sorted(searches, key=lambda each: each.least_step_s):
        if search.least_step_s <= HOPELESS * least:
            search.narrow(COARSE, give_up=HOPELESS * least, ratio=ratio)
            search.add()
            least = min(least, search.best_s)
            ratio = search.ratio or ratio
    feasible = [search for search in searches if search.found]
    for search in sorted(feasible, key=lambda each: each.best_s)[:REFINED]:
        search.refine(give_up=PROMISING * least)
        least = min(least, search.best_s)
    return [candidate for search in searches for candidate in search.found]


class Search:
    """One micro-batch size.

    Attributes:
        low: a bound on the period under which there are too few devices.
        high: one under which there are enough; infinite if none is known.
        found: candidates so far.
    """

    def __init__(self, problem: Problem, microbatch_size: int) -> None:
        self._problem = problem
        self._prices = problem.prices(microbatch_size)
        self._reach = problem.reach(self._prices)
        self._parts = PartPrices(self._prices)
        self._assembler = Assembler(
            self._parts, problem.order, problem.max_replicas, problem.chained
        )
        self._bound = Bound(float("inf"))
        self._found: Found | LineFound | None = None
        self._seen: set[frozenset[Part]] = set()
        self._least_s = self._least_period()
        self.low = self._least_s
        self.high = float("inf")
        self.found: list[Candidate] = []

    @property
    def best_s(self) -> float:
        """The least estimated step so far."""
        return min((each.step_s for each in self.found), default=float("inf"))

    @property
    def least_step_s(self) -> float:
        """No step within the bound that is searched is shorter."""
        return self._prices.num_microbatches * self.low

    def _least_period(self) -> float:
        """All work shared out evenly, and no less than the longest operator."""
        work = longest = float("inf")
        for degree in self._prices.degrees:
            seconds = sum(self._problem.cost.op_seconds(self._prices.samples(degree)))
            work = min(work, float(np.sum(seconds)) * degree)
            longest = min(longest, float(np.max(seconds)))
        return max(work / self._problem.cost.cluster.num_devices, longest) * (1 - 1e-9)

    @property
    def ratio(self) -> float | None:
        """What there is over the least period that work alone allows; None if nothing is known."""
        return self.high / self._least_s if self.high < float("inf") else None

    def narrow(
        self, tolerance: float, *, give_up: float = float("inf"), ratio: float = 1.2
    ) -> None:
        """Bring low and high together.

        Args:
            tolerance: how near, relative.
            give_up: stop once the step is sure to be longer.
            ratio: where to start, as a multiple of low.
        """
        if self.high == float("inf"):
            self._find_high(give_up, self.low * ratio * (1 + COARSE / 2))
        while self.low * (1 + tolerance) < self.high < float("inf"):
            if self.least_step_s > give_up:
                return
            # Near to high if that was a good guess, in the middle if not.
            self._try(max(self.high / (1 + COARSE), (self.low * self.high) ** 0.5))

    def _find_high(self, give_up: float, high: float) -> None:
        tries = 0
        while not self._try(high):
            tries += 1
            if self.least_step_s > give_up:
                return
            if tries == 2 and not self._try(float("inf")):
                return
            high *= 1.25**tries
        self.high = high

    def _try(self, period_s: float) -> bool:
        """Whether the devices suffice under this period; remembered in low or high."""
        found = self._reach.solve(self._within(period_s), [self._reach.heights - 1])
        if found.devices[0] > self._problem.cost.cluster.num_devices:
            self.low = max(self.low, period_s)
            return False
        self.high = min(self.high, period_s)
        self._found = found
        return True

    def _within(self, period_s: float) -> Bound:
        return replace(self._bound, period_s=period_s)

    def add(self) -> None:
        """Add the plan with the fewest devices at the least period known, if there is one."""
        if self._found is not None:
            self._add(self._found.parts(0))

    def refine(self, *, give_up: float) -> None:
        """Better the best candidate: no longer all-reduce, the least period for that; then depth.

        What a stage needs for its all-reduce is not gained by being quicker than the slowest stage,
        so from here on it is bounded apart.
        """
        start = min(self.found, key=lambda each: each.step_s)
        parts = [self._part(stage) for stage in start.graph.stages]
        longest = max(self._parts.reduce_s(part) for part in parts)
        allowed = max(REDUCE * longest, REDUCE_SHARE * start.step_s)
        self._bound = Bound(float("inf"), spread=False, reduce_s=allowed)
        self.low, self.high = self._least_s, float("inf")
        likely = max(self._slowest_s(part) for part in parts) * (1 + 1e-9)
        self._find_high(give_up, likely)
        self.narrow(self._problem.tolerance, give_up=give_up)
        self._add_shallow(give_up)

    def _slowest_s(self, part: Part) -> float:
        reduce_s = self._parts.reduce_s(part) / self._prices.num_microbatches
        return self._parts.period_s(part) - reduce_s

    def _part(self, stage: Stage) -> Part:
        return Part(self._problem.cost.graph.mask(stage.operators), stage.replicas)

    def _add_shallow(self, give_up: float) -> None:
        """Add the plans of least depth at the least bound and at looser ones."""
        caps = _caps(self._reach.heights)
        period = self.high
        depth = len(caps)
        for _ in range(MOST_LOOSER):
            if depth == 0 or self._prices.num_microbatches * period > give_up:
                return
            found = self._reach.solve(self._within(period), caps[:depth])
            if depth == len(caps):
                self._add(found.parts(depth - 1))
            feasible = np.flatnonzero(found.devices <= self._problem.cost.cluster.num_devices)
            if len(feasible):
                depth = int(feasible[0])
                self._add(self._tightened(period, caps[depth], found.parts(depth)))
            period *= LOOSER

    def _tightened(self, period: float, cap: int, parts: list[Part]) -> list[Part]:
        """The parts for about the least period at which this cap on the height is kept."""
        low = max(self.high, period / LOOSER)
        for _ in range(2):
            middle = (low * period) ** 0.5
            found = self._reach.solve(self._within(middle), [cap])
            if found.devices[0] <= self._problem.cost.cluster.num_devices:
                period, parts = middle, found.parts(0)
            else:
                low = middle
        return parts

    def _add(self, parts: list[Part]) -> None:
        key = frozenset(parts)
        if key not in self._seen:
            self._seen.add(key)
            candidate = self._assembler.assemble(parts)
            if candidate is not None:
                self.found.append(candidate)


def unchained(problem: Problem, chains: Sequence[Candidate]) -> Iterator[Candidate]:
    """The stages of sequential candidates, waiting only for those whose values they read."""
    for chain in chains:
        stages = chain.graph.stages
        prices = PartPrices(problem.prices(stages[0].microbatch_size))
        assembler = Assembler(prices, problem.order, problem.max_replicas)
        mask = problem.cost.graph.mask
        parts = [Part(mask(stage.operators), stage.replicas) for stage in stages]
        candidate = assembler.assemble(parts)
        if candidate is not None:
            yield candidate


def best(
    found: Sequence[Candidate], count: int, always: Sequence[Candidate] = ()
) -> list[Candidate]:
    """The candidates with the least estimated step, each stage graph once, the least first.

    Args:
        found: candidates.
        count: how many to keep.
        always: candidates of which the best is kept whatever its estimate.
    """
    ranked = sorted([*found, *always], key=lambda each: each.step_s)
    unique = list({each.graph: each for each in reversed(ranked)}.values())[::-1]
    kept = unique[:count]
    spared = min(always, key=lambda each: each.step_s, default=None)
    if spared is not None and all(each.graph != spared.graph for each in kept):
        kept[count - 1 :] = [spared]
    return kept


def _caps(heights: int) -> list[int]:
    """Largest heights to try: all small ones, then in steps of about a quarter."""
    caps = [0]
    while caps[-1] < heights - 1:
        caps.append(min(heights - 1, caps[-1] + 1 + caps[-1] // 4))
    return caps
