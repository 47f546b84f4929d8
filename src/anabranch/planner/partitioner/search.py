"""The search that graphpipe and sequential share: micro-batch sizes, bounds, depths.

For every micro-batch size the least bound on the period is found, ``partitioner.reach`` asked for
the fewest devices under many bounds at once. The bottleneck is not the step, though: a step takes
about ``(M - 1) * period + critical path``, and a plan that is a little slower but half as deep may
win. So three things are done:

- coarsely for every size, on a ladder of bounds, the least period with the all-reduce spread over
  the micro-batches;
- closely for the few sizes with the best estimates, the least period without it, the all-reduce
  held to about that of the coarse plan: nothing is gained by a stage that computes less than the
  slowest and then reduces for longer;
- for these, at looser bounds, the smallest depths that the devices allow.

All of these become candidates, ranked by ``partitioner.estimate``. Sizes that cannot come near the
best estimate are left early.

Memory rises with the height of a stage. A bound is first tried as if every stage were at the sink,
which costs little and is a lower limit; the stages found that way often fit. Where they do not, the
bounds from there on are tried again with all heights, and where that costs more than ``DEARER``,
once more with recomputation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from anabranch.planner.partitioner.assemble import Candidate
from anabranch.planner.partitioner.chains import Block, Chain, line
from anabranch.planner.partitioner.parts import Part, fits, heights
from anabranch.planner.partitioner.prices import Bound, Prices, microbatch_sizes
from anabranch.planner.partitioner.problem import Problem as Problem
from anabranch.planner.partitioner.reach import Reach
from anabranch.planner.partitioner.solved import Found

LADDER = (1.03, 1.07, 1.12, 1.19, 1.28, 1.42, 1.7, 2.5, 6.0, float("inf"))
"""The bounds that are tried first, as multiples of what all work shared out evenly would take."""

TOGETHER = 4
"""Micro-batch sizes that are looked at together, the most promising first."""

STEPS = 6
"""Bounds that are tried next, between the last that failed and the first that did not."""

NEAR = 1.05
"""Unless these are so near to each other."""

TOP = 1e4
"""Where no bound is known to suffice but none at all, this many times the one that failed."""

FIRST = 1
"""Sizes of those that get a candidate before it is known which ones are hopeless."""

CLOSER = (0.86, 0.88, 0.9, 0.92, 0.94, 0.955, 0.97, 0.98, 0.99, 1.0, 1.03, 1.1)
"""The bounds that are tried closely, as multiples of the period of a candidate."""

HOPELESS = 1.2
"""A micro-batch size gets no candidate if its step cannot be within this factor of the best."""

LIKELY = 1.12
"""Plans are left out whose steps are longer than this many times the best if nothing is sent."""

REFINED = 3
"""Micro-batch sizes that are looked at closely: those with the best coarse candidates."""

PROMISING = 1.05
"""They are left as soon as their steps cannot be within this factor of the best."""

ROWS = 3
"""Micro-batch sizes for which stages that are runs of the model in one order are tried too."""

REDUCE = 1.25
REDUCE_SHARE = 0.03
"""All-reduces may take this many times the longest of the coarse plan, or this share of a step."""

LOOSER = (1.0, 1.02, 1.04, 1.08, 1.13, 1.2, 1.3, 1.42)
"""Multiples of the least period that are tried for smaller depths."""

CAPS = 6
"""Depths that are tried at most."""

DEARER = 1.02
"""Recomputation is tried where heights cost more than this factor in the least period."""

ENTRIES = 1 << 22
"""Entries of the largest tables that are made at once."""


@dataclass
class Size:
    """One micro-batch size.

    Attributes:
        prices: of this size.
        least_s: no period is shorter.
        pool, at: where its tables are.
        low: a bound on the period under which there are too few devices.
        high: one under which there are enough; infinite if none is known.
        parts: the stages under ``high``.
        recompute: whether those may recompute.
        found: candidates so far.
    """

    prices: Prices
    least_s: float
    pool: int = 0
    at: int = 0
    low: float = 0.0
    high: float = float("inf")
    parts: list[Part] = field(default_factory=list)
    recompute: bool = False
    found: list[Candidate] = field(default_factory=list)
    seen: set[frozenset[Part]] = field(default_factory=set)

    @property
    def count(self) -> int:
        """Micro-batches of a step."""
        return self.prices.num_microbatches

    @property
    def outline_s(self) -> float:
        """No step of two stages in a row is shorter, as far as is known."""
        return (self.count + 1) * self.low

    @property
    def best_s(self) -> float:
        """The least estimated step so far."""
        return min((each.step_s for each in self.found), default=float("inf"))

    def between(self, steps: int) -> list[float]:
        """Periods from above low to high, evenly spaced in ratio."""
        top = min(self.high, TOP * self.low)
        periods = [self.low * (top / self.low) ** (i / steps) for i in range(1, steps)]
        return [*periods, self.high]

    def bounds(self, periods: Iterable[float], template: Bound) -> list[Bound]:
        """Bounds for this size."""
        return [replace(template, period_s=each, at=self.at) for each in periods]


@dataclass(frozen=True)
class Table:
    """Bounds of a size, ascending, and the first that suffices if every stage were at the sink.

    Attributes:
        size: the micro-batch size.
        bounds: ascending.
        first: place of the first that suffices.
        stages: its stages.
    """

    size: Size
    bounds: Sequence[Bound]
    first: int
    stages: Callable[[], list[Part]]

    @property
    def outline_s(self) -> float:
        """About what a step takes if the way there and back is that of a few stages."""
        return (self.size.count + 3) * self.bounds[self.first].period_s


class Search:
    """The search for one problem.

    Args:
        problem: what is to be planned.
        sizes: micro-batch sizes.
        known_s: a step that is known to be possible, so that worse sizes can be left out.
        hopeless: a size is left out if its step cannot be within this factor of the best.
    """

    def __init__(
        self,
        problem: Problem,
        sizes: Sequence[int],
        known_s: float = float("inf"),
        hopeless: float = HOPELESS,
    ) -> None:
        self.problem = problem
        self._hopeless = hopeless
        self.devices = problem.cost.cluster.num_devices
        self._known_s = known_s
        self.sizes: list[Size] = []
        found = []
        for b in sizes:
            prices = problem.prices(b)
            if prices.degrees:
                least_s = least_period(prices)
                found.append(Size(prices, least_s, low=least_s))
        found.sort(key=lambda size: size.outline_s)
        self.sizes = [size for size in found if self._promising(size, self._hopeless)]
        self._pools = 0
        self._pool()
        self._assemblers = {id(size): problem.assembler(size.prices) for size in self.sizes}
        self._reaches: dict[tuple[int, bool], Reach] = {}

    def _pool(self) -> None:
        """Put together as many sizes as tables may be large."""
        if not self.sizes:
            return
        modes = max(len(size.prices.modes) for size in self.sizes)
        ranges, sharing = entries(self.problem.chain, modes, self.devices)
        together = max(1, min(TOGETHER, ENTRIES // (ranges * modes)))
        for place, size in enumerate(self.sizes):
            size.pool, size.at = divmod(place, together)
        self._pools = -(-len(self.sizes) // together)
        self._at_once = max(2, ENTRIES // (ranges + sharing))
        self._large = together < TOGETHER or self._at_once < TOGETHER * len(LADDER)

    @property
    def best_s(self) -> float:
        """The least estimated step so far, or the one that was known."""
        return min((size.best_s for size in self.sizes), default=self._known_s)

    def run(self) -> Iterator[Candidate]:
        """Candidates as they are found; none if nothing fits."""
        yield from self.coarse()
        feasible = sorted((s for s in self.sizes if s.found), key=lambda size: size.best_s)
        refined = feasible[:REFINED]
        yield from self._closely(refined)
        yield from self._shallow(refined)

    def coarse(self) -> Iterator[Candidate]:
        """Those that need no closer look."""
        for pool in range(self._pools):
            yield from self._coarsely([size for size in self.sizes if size.pool == pool])

    def _promising(self, size: Size, factor: float) -> bool:
        return size.outline_s <= factor * min(self.best_s, self._known_s)

    def _coarsely(self, sizes: Sequence[Size]) -> Iterator[Candidate]:
        """One candidate for each size that is not hopeless."""
        jobs = [
            (size, size.bounds(self._rungs(size), Bound(np.inf)))
            for size in sizes
            if self._promising(size, self._hopeless)
        ]
        tables = self._ladder(jobs)
        if self.problem.recompute:
            # What fits nowhere as it is may fit with recomputation.
            known = {id(table.size) for table in tables}
            rest = [job for job in jobs if id(job[0]) not in known]
            for size, _ in rest:
                size.low, size.recompute = size.least_s, True
            tables += self._ladder(rest)
        for table in sorted(tables, key=lambda table: table.outline_s)[:FIRST]:
            yield from self._settle(table)
        near = [table for table in tables if self._promising(table.size, self._hopeless)]
        jobs = [
            (table.size, table.size.bounds(table.size.between(STEPS), Bound(np.inf)))
            for table in near
            if table.size.high > NEAR * table.size.low
        ]
        again = {id(table.size): table for table in self._ladder(jobs)}
        for table in sorted(near, key=lambda table: table.outline_s):
            if self._promising(table.size, self._hopeless):
                yield from self._settle(again.get(id(table.size), table), LIKELY)

    def _rungs(self, size: Size) -> list[float]:
        """The first bounds for a size, without those with which it would be hopeless."""
        most = self._hopeless * min(self.best_s, self._known_s) / (size.count + 1)
        periods = [size.least_s * ratio for ratio in LADDER]
        return [period for period in periods if period <= most or period == np.inf]

    def _closely(self, sizes: Sequence[Size]) -> Iterator[Candidate]:
        """Better candidates for some sizes: no longer all-reduce, the least period for that.

        What a stage needs for its all-reduce is not gained by being quicker than the slowest stage,
        so from here on it is bounded apart.
        """
        templates = {}
        jobs = []
        for size in sizes:
            templates[id(size)], likely = self._apart(size)
            size.low, size.high = size.least_s, np.inf
            periods = [likely * ratio for ratio in CLOSER if likely * ratio >= size.least_s]
            jobs.append((size, size.bounds(periods, templates[id(size)])))
        tables = self._ladder(jobs)
        jobs = [
            (table.size, table.size.bounds(table.size.between(STEPS), templates[id(table.size)]))
            for table in tables
            if self._promising(table.size, PROMISING)
        ]
        again = {id(table.size): table for table in self._ladder(jobs)}
        for table in tables:
            if self._promising(table.size, PROMISING):
                yield from self._settle(again.get(id(table.size), table), PROMISING)

    def _apart(self, size: Size) -> tuple[Bound, float]:
        """A bound like the best candidate's, the all-reduce apart, and the candidate's period."""
        best = min(size.found, key=lambda each: each.step_s)
        prices = self._assemblers[id(size)].prices
        parts = [
            Part(
                self.problem.cost.graph.mask(stage.operators),
                stage.replicas,
                stage.recompute,
                stage.tensor,
            )
            for stage in best.graph.stages
        ]
        reduce_s = [prices.reduce_s(part) for part in parts]
        allowed = max(REDUCE * max(reduce_s), REDUCE_SHARE * best.step_s)
        likely = max(
            prices.period_s(part) - each / size.count
            for part, each in zip(parts, reduce_s, strict=True)
        )
        return Bound(np.inf, spread=False, reduce_s=allowed), likely * (1 + 1e-9)

    def least(self, tolerance: float) -> tuple[float, list[Part]]:
        """The least period of the first size, the all-reduce spread, and its stages.

        Args:
            tolerance: how near to the least, relative.

        Returns:
            Infinite, and none, if nothing fits.
        """
        (size,) = self.sizes
        periods = [size.least_s * ratio for ratio in LADDER]
        while True:
            tables = self._ladder([(size, size.bounds(periods, Bound(np.inf)))])
            if not tables and self.problem.recompute and not size.recompute:
                size.low, size.recompute = size.least_s, True
                continue
            for table in tables:
                list(self._settle(table, factor=0.0))
            if not tables or not size.parts or size.high <= size.low * (1 + tolerance):
                return size.high, size.parts
            periods = size.between(STEPS)

    def _shallow(self, sizes: Sequence[Size]) -> Iterator[Candidate]:
        """The plans of least depth at the least bound and at looser ones."""
        jobs: dict[tuple[int, bool], list[tuple[Size, list[Bound]]]] = {}
        for size in sizes:
            if size.parts and self._promising(size, PROMISING):
                limit = max(PROMISING * min(self.best_s, self._known_s) / size.count, size.high)
                periods = [size.high * ratio for ratio in LOOSER if size.high * ratio <= limit]
                bounds = size.bounds(periods, self._apart(size)[0])
                jobs.setdefault((size.pool, size.recompute), []).append((size, bounds))
        for together in jobs.values():
            caps = self._caps([size for size, _ in together])
            bounds = [bound for _, each in together for bound in each]
            if caps:
                found = self._reach(together[0][0]).solve(bounds, caps)
                t = 0
                for size, each in together:
                    yield from self._shallowest(size, found, range(t, t + len(each)))
                    t += len(each)

    def _shallowest(self, size: Size, found: Found, places: range) -> Iterator[Candidate]:
        """For each depth the least period, unless a lesser depth has the same."""
        tried = len(places)
        for u in range(found.devices.shape[1]):
            enough = np.flatnonzero(found.devices[places.start : places.stop, u] <= self.devices)
            if len(enough) and enough[0] < tried:
                tried = int(enough[0])
                yield from self._add(size, found.parts(places[tried], u), PROMISING)

    def _caps(self, sizes: Sequence[Size]) -> list[int]:
        """Largest heights to try, all of them less than what is known."""
        known = 0
        for size in sizes:
            parts, pairs = self._assemblers[id(size)].arrange(size.parts)
            known = max(known, *heights(len(parts), pairs))
        caps = [0]
        while caps[-1] < known - 1:
            caps.append(min(known - 1, caps[-1] + 1 + caps[-1] // 4))
        return caps[-CAPS:] if known else []

    def _ladder(self, jobs: Sequence[tuple[Size, Sequence[Bound]]]) -> list[Table]:
        """Tables for some bounds of every size, as if stages were at the sink.

        Returns:
            One per size for which some bound suffices; low and high of the sizes are set.
        """
        result = []
        for size, bounds, places in self._lightly(jobs):
            devices = [int(found.devices[t, 0]) for found, t in places]
            first = next((i for i, each in enumerate(devices) if each <= self.devices), None)
            last = len(bounds) - 1 if first is None else first - 1
            if last >= 0:
                size.low = max(size.low, bounds[last].period_s)
            if first is not None:
                size.high = bounds[first].period_s
                found, t = places[first]
                stages = partial(found.parts, t)
                if self._large:
                    # Large tables are not kept.
                    parts = stages()
                    stages = partial(list, parts)
                result.append(Table(size, bounds, first, stages))
        return result

    def _reach(self, size: Size) -> Reach:
        key = size.pool, size.recompute
        if key not in self._reaches:
            if self._large:
                self._reaches.clear()
            prices = [
                replace(each.prices, recompute=size.recompute)
                for each in self.sizes
                if each.pool == size.pool
            ]
            self._reaches[key] = self.problem.reach(*prices)
        return self._reaches[key]

    def _lightly(
        self, jobs: Sequence[tuple[Size, Sequence[Bound]]]
    ) -> Iterator[tuple[Size, Sequence[Bound], list[tuple[Found, int]]]]:
        """Tables for some bounds of every size, as if stages were at the sink."""
        waiting: list[tuple[Size, Sequence[Bound]]] = []
        for job in jobs:
            if waiting and (
                (waiting[0][0].pool, waiting[0][0].recompute) != (job[0].pool, job[0].recompute)
                or sum(len(bounds) for _, bounds in (*waiting, job)) > self._at_once
            ):
                yield from self._solve(waiting)
                waiting = []
            waiting.append(job)
        yield from self._solve(waiting)

    def _solve(
        self, jobs: Sequence[tuple[Size, Sequence[Bound]]]
    ) -> Iterator[tuple[Size, Sequence[Bound], list[tuple[Found, int]]]]:
        if not jobs:
            return
        reach = self._reach(jobs[0][0])
        bounds = [bound for _, each in jobs for bound in each]
        places: list[tuple[Found, int]] = []
        for start in range(0, len(bounds), self._at_once):
            found = reach.lightly(bounds[start : start + self._at_once])
            places += [(found, t) for t in range(len(found.bounds))]
        for size, each in jobs:
            yield size, each, places[: len(each)]
            places = places[len(each) :]

    def _settle(self, table: Table, factor: float = float("inf")) -> Iterator[Candidate]:
        """Add the plan under the first bound that suffices, also where memory is concerned.

        Args:
            table: of one size.
            factor: as for ``_add``.
        """
        size = table.size
        place, parts, recompute = table.first, table.stages(), size.recompute
        if not self._fits(size, parts):
            place, parts, recompute = self._heavily(size, table.bounds, table.first)
        if place > table.first:
            size.low = table.bounds[place - 1].period_s
        size.high = table.bounds[place].period_s if parts else np.inf
        size.parts, size.recompute = parts, recompute
        if parts:
            yield from self._add(size, parts, factor)

    def _least_step_s(self, size: Size, parts: Sequence[Part]) -> float:
        """Seconds of a step of these stages if messages took no time."""
        assembler = self._assemblers[id(size)]
        arranged, pairs = assembler.arrange(parts)
        seconds = [sum(assembler.prices.compute_s(part)) for part in arranged]
        way = list(seconds)
        for x, y in sorted(pairs, reverse=True):
            way[x] = max(way[x], way[y] + seconds[x])
        return (size.count - 1) * max(seconds) + max(way)

    def _heavily(
        self, size: Size, bounds: Sequence[Bound], first: int
    ) -> tuple[int, list[Part], bool]:
        """The first bound from a place on that suffices when memory rises with the height.

        Returns:
            Its place, the stages (none if no bound suffices), and whether they may recompute.
        """
        place, parts = self._with_heights(size, bounds, first)
        dear = not parts or bounds[place].period_s > DEARER * bounds[first].period_s
        if self.problem.recompute and not size.recompute and dear:
            again = replace(size, recompute=True)
            other, its_parts = self._with_heights(again, bounds[: place + 1], first)
            if its_parts and (not parts or other < place):
                return other, its_parts, True
        return place, parts, size.recompute

    def _with_heights(
        self, size: Size, bounds: Sequence[Bound], first: int
    ) -> tuple[int, list[Part]]:
        reach = self._reach(size)
        step = max(1, self._at_once // reach.heights)
        for start in range(first, len(bounds), step):
            found = reach.solve(bounds[start : start + step])
            enough = np.flatnonzero(found.devices[:, 0] <= self.devices)
            if len(enough):
                return start + int(enough[0]), found.parts(int(enough[0]))
        return len(bounds) - 1, []

    def _fits(self, size: Size, parts: Sequence[Part]) -> bool:
        assembler = self._assemblers[id(size)]
        arranged, pairs = assembler.arrange(parts)
        return fits(assembler.prices, arranged, pairs)

    def _add(self, size: Size, parts: list[Part], factor: float) -> Iterator[Candidate]:
        """The plan of these stages, unless its step is more than a multiple of the best even if
        messages took no time.
        """
        key = frozenset(parts)
        limit = factor * min(self.best_s, self._known_s)
        if key not in size.seen and self._least_step_s(size, parts) <= limit:
            size.seen.add(key)
            candidate = self._assemblers[id(size)].assemble(parts)
            if candidate is not None:
                size.found.append(candidate)
                yield candidate


def candidates(
    problem: Problem, microbatch_size: int | None, *, known_s: float = float("inf")
) -> Iterator[Candidate]:
    """Candidates for one micro-batch size or all, as they are found; none if nothing fits.

    Args:
        problem: what is to be planned.
        microbatch_size: only this size.
        known_s: a step that is known to be possible, so that worse sizes can be left out.
    """
    sizes = [microbatch_size] if microbatch_size else microbatch_sizes(problem.batch_size)
    yield from Search(problem, sizes, known_s).run()


def in_a_row(
    problem: Problem, microbatch_size: int | None, found: Sequence[Candidate]
) -> Iterator[Candidate]:
    """Candidates whose stages are runs of the model in one order, at the best sizes found.

    A stage may then be the tail of one branch and the head of the next, which the search over
    branches does not know. Stages wait only for those whose values they read.

    Args:
        problem: what is planned, with its branches.
        microbatch_size: only this size.
        found: candidates so far.
    """
    if not problem.chain.blocks:
        return
    ranked = sorted(found, key=lambda each: each.step_s)
    sizes = list(dict.fromkeys(each.graph.stages[0].microbatch_size for each in ranked))[:ROWS]
    if not sizes:
        sizes = [microbatch_size] if microbatch_size else list(microbatch_sizes(problem.batch_size))
    known_s = ranked[0].step_s if ranked else float("inf")
    row = replace(problem, chain=line(problem.cost, problem.order, coarse=True))
    yield from Search(row, sizes, known_s, PROMISING).coarse()


def least_period(prices: Prices) -> float:
    """A lower limit: all work shared out evenly, and no less than the longest operator."""
    work = longest = float("inf")
    for mode in prices.modes:
        seconds = sum(prices.cost.op_seconds(prices.samples(mode.replicas), mode.tensor))
        work = min(work, float(np.sum(seconds)) * mode.devices)
        longest = min(longest, float(np.max(seconds)))
    return max(work / prices.cost.cluster.num_devices, longest) * (1 - 1e-9)


def entries(chain: Chain, modes: int, devices: int) -> tuple[int, int]:
    """About how many entries the tables of a model have, per bound.

    Returns:
        Those of ranges, and those of shares.
    """
    ranges, sharing = (chain.row.size + 1) ** 2, 0
    for item in chain.items:
        if isinstance(item, Block):
            ranges += (item.row.size + 1) ** 2
            sharing += (item.row.size + 1) * modes * (devices + 1)
            for k in set(item.classes):
                inner = entries(item.branches[k], modes, devices)
                ranges, sharing = ranges + inner[0], sharing + inner[1]
    return ranges, sharing


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
