"""The search that graphpipe and sequential share: micro-batch sizes, bounds, depths.

For every micro-batch size the least bound on the period is found (``partitioner.period_bounds``).
As a step takes about ``(M - 1) * period + critical path``, three things are done:

- coarsely for every size, on a ladder of bounds, the least period with the all-reduce spread over
  the micro-batches;
- closely for the few sizes with the best estimates, the least period without it, the all-reduce
  held to about that of the coarse plan;
- for these, at looser bounds, the smallest depths that the devices allow.

All become candidates, ranked by ``toolkit.estimate``. Sizes that cannot come near the best estimate
are left early; a plan of several stages is taken to be two deep at least.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from anabranch.planner.partitioner.chains import Chain, line
from anabranch.planner.partitioner.limits import BRIEF, QUICK, SEARCH, THOROUGH, Effort
from anabranch.planner.partitioner.period_bounds import Job, PeriodBounds, Size, least_period
from anabranch.planner.toolkit.assemble import Assembler, Candidate
from anabranch.planner.toolkit.parts import Part, heights
from anabranch.planner.toolkit.prices import Bound
from anabranch.planner.toolkit.problem import SHORT, Problem


class PeriodSearch:
    """The search for one problem.

    Args:
        effort: how much is looked at; by default little in a large model.
        uneven: as for ``Problem.prices``.
    """

    def __init__(
        self,
        problem: Problem,
        chain: Chain,
        sizes: Sequence[int],
        known_s: float = float("inf"),
        effort: Effort | None = None,
        *,
        uneven: bool = True,
    ) -> None:
        self._problem = problem
        self._known_s = known_s
        self._effort = effort or (BRIEF if len(problem.order) > SEARCH.items else QUICK)
        self._sizes: list[Size] = []
        found = []
        for microbatch_size in sizes:
            prices = problem.prices(microbatch_size, uneven=uneven)
            if prices.modes:
                least_s = least_period(prices)
                found.append(Size(prices, least_s, low=least_s))
        found.sort(key=lambda size: size.outline_s)
        self._sizes = [size for size in found if self._promising(size, self._effort.hopeless)]
        self._ladder = PeriodBounds(problem, chain, self._sizes)

    def run(self) -> Iterator[Candidate]:
        """Candidates as they are found; none if nothing fits."""
        yield from self.coarse()
        feasible = sorted((s for s in self._sizes if s.found), key=lambda size: size.best_s)
        refined = feasible[: self._effort.refined]
        yield from self._closely(refined)
        yield from self._shallow(refined)

    def coarse(self) -> Iterator[Candidate]:
        """Those that need no closer look."""
        for pool in self._ladder.pools:
            yield from self._coarsely(pool)

    def least(self, tolerance: float) -> tuple[float, list[Part]]:
        """The least period of the first size, to a relative ``tolerance``, and its stages.

        The all-reduce is spread. Infinite, and none, if nothing fits.
        """
        size = self._sizes[0]
        periods = [size.least_s * ratio for ratio in SEARCH.first_bounds]
        while True:
            tables = self._ladder.lightly([(size, size.bounds(periods, Bound(np.inf)))])
            if not tables and self._problem.recompute and not size.recompute:
                size.low, size.recompute = size.least_s, True
                continue
            for table in tables:
                self._ladder.settle(table)
            if not tables or not size.parts or size.high <= size.low * (1 + tolerance):
                return size.high, size.parts
            periods = size.between(SEARCH.steps)

    @property
    def _best_s(self) -> float:
        """The least step that is known."""
        return min((size.best_s for size in self._sizes), default=np.inf)

    def _limit(self, factor: float) -> float:
        """A multiple of the least step that is known."""
        return factor * min(self._known_s, self._best_s)

    def _promising(self, size: Size, factor: float) -> bool:
        return size.outline_s <= self._limit(factor)

    def _assembler(self, size: Size) -> Assembler:
        return self._problem.assembler(size.prices.microbatch_size)

    def _coarsely(self, sizes: Sequence[Size]) -> Iterator[Candidate]:
        """One candidate for each size that is not hopeless."""
        jobs = [
            (size, size.bounds(self._rungs(size), Bound(np.inf)))
            for size in sizes
            if self._promising(size, self._effort.hopeless)
        ]
        tables = self._ladder.lightly(jobs)
        if self._problem.recompute:
            # What fits nowhere as it is may fit with recomputation.
            known = {id(table.size) for table in tables}
            rest = [job for job in jobs if id(job[0]) not in known]
            for size, _ in rest:
                size.low, size.recompute = size.least_s, True
            tables += self._ladder.lightly(rest)
        tables.sort(key=lambda table: table.outline_s)
        for table in tables[:1]:
            # Its estimate tells which of the others are hopeless.
            self._ladder.settle(table)
            yield from self._add(table.size, table.size.parts, np.inf)
        near = [table for table in tables if self._promising(table.size, self._effort.hopeless)]
        enough = SEARCH.near_in_large if self._ladder.is_large else SEARCH.near
        again = self._ladder.lightly(
            [
                (table.size, table.size.bounds(table.size.between(SEARCH.steps), Bound(np.inf)))
                for table in near
                if table.size.high > enough * table.size.low
            ]
        )
        latest = {id(table.size): table for table in [*near, *again]}
        for table in near:
            if self._promising(table.size, self._effort.hopeless):
                self._ladder.settle(latest[id(table.size)])
                yield from self._add(table.size, table.size.parts, self._effort.likely)

    def _rungs(self, size: Size) -> list[float]:
        """The first bounds for a size, without those with which it would be hopeless."""
        most = self._limit(self._effort.hopeless) / (size.count + 1)
        periods = [size.least_s * ratio for ratio in SEARCH.first_bounds]
        return [period for period in periods if period <= most or period == np.inf]

    def _closely(self, sizes: Sequence[Size]) -> Iterator[Candidate]:
        """Better candidates: no longer all-reduce, and the least period for that."""
        templates = {}
        jobs: list[Job] = []
        for size in sizes:
            template, likely = self._apart(size)
            templates[id(size)] = template
            size.low, size.high = size.least_s, np.inf
            periods = [
                likely * ratio for ratio in SEARCH.close_bounds if likely * ratio >= size.least_s
            ]
            jobs.append((size, size.bounds(periods, template)))
        latest = {id(table.size): table for table in self._ladder.lightly(jobs)}
        while True:
            jobs = [
                (size, size.bounds(size.between(SEARCH.steps), templates[id(size)]))
                for size in (table.size for table in latest.values())
                if size.high > size.low * (1 + self._problem.tolerance)
                and self._promising(size, SEARCH.promising)
            ]
            if not jobs:
                break
            latest |= {id(table.size): table for table in self._ladder.lightly(jobs)}
        for table in latest.values():
            if self._promising(table.size, SEARCH.promising):
                self._ladder.settle(table)
                yield from self._add(table.size, table.size.parts, SEARCH.promising)

    def _apart(self, size: Size) -> tuple[Bound, float]:
        """A bound like the best candidate's, the all-reduce apart, and the candidate's period."""
        best = min(size.found, key=lambda candidate: candidate.step_s)
        prices = self._assembler(size).prices
        parts = [
            Part(
                self._problem.cost.graph.mask(stage.operators),
                stage.replicas,
                stage.recompute,
                stage.tensor,
            )
            for stage in best.graph.stages
        ]
        reduce_s = [prices.reduce_s(part) for part in parts]
        allowed = max(SEARCH.reduce_factor * max(reduce_s), SEARCH.reduce_share * best.step_s)
        likely = max(map(prices.work_s, parts))
        return Bound(np.inf, spread=False, reduce_s=allowed), likely * (1 + 1e-9)

    def _shallow(self, sizes: Sequence[Size]) -> Iterator[Candidate]:
        """The plans of least depth at the least bound and at looser ones."""
        jobs: list[Job] = []
        for size in sizes:
            if size.parts and self._promising(size, SEARCH.promising):
                limit = max(self._limit(SEARCH.promising) / size.count, size.high)
                periods = [
                    size.high * ratio for ratio in self._effort.looser if size.high * ratio <= limit
                ]
                jobs.append((size, size.bounds(periods, self._apart(size)[0])))
        caps = self._caps([size for size, _ in jobs])
        if caps and self._ladder.room(caps) < sum(len(bounds) for _, bounds in jobs):
            jobs, caps = [(size, bounds[::2]) for size, bounds in jobs[:1]], caps[-3:]
        if caps:
            for size, parts in self._ladder.shallowest(jobs, caps):
                yield from self._add(size, parts, SEARCH.promising)

    def _caps(self, sizes: Sequence[Size]) -> list[int]:
        """Largest heights to try, up to what is known."""
        known = 0
        for size in sizes:
            parts, pairs = self._assembler(size).arrange(size.parts)
            known = max(known, *heights(len(parts), pairs))
        caps = [0]
        while caps[-1] < known:
            caps.append(min(known, caps[-1] + 1 + caps[-1] // (self._effort.caps - 2)))
        return caps[-self._effort.caps :] if sizes else []

    def _add(self, size: Size, parts: list[Part], factor: float) -> Iterator[Candidate]:
        """The plan of these stages, if there are any, unless its step is more than a multiple of
        the best even if messages took no time.
        """
        key = frozenset(parts)
        if parts and key not in size.seen and self._alone_s(size, parts) <= self._limit(factor):
            size.seen.add(key)
            assembler = self._assembler(size)
            for candidate in assembler.assemblies(parts):
                size.found.append(candidate)
                yield candidate

    def _alone_s(self, size: Size, parts: Sequence[Part]) -> float:
        """Seconds of a step of these stages if messages took no time."""
        assembler = self._assembler(size)
        arranged, pairs = assembler.arrange(parts)
        seconds = [sum(assembler.prices.compute_s(part)) for part in arranged]
        way = list(seconds)
        for x, y in sorted(pairs, reverse=True):
            way[x] = max(way[x], way[y] + seconds[x])
        return (size.count - 1) * max(seconds) + max(way)


def candidates(
    problem: Problem, chain: Chain, microbatch_size: int | None, *, known_s: float = float("inf")
) -> Iterator[Candidate]:
    """Candidates for one micro-batch size or all, as they are found; none if nothing fits.

    Args:
        known_s: a step that is known to be possible, so that worse sizes can be left out.
    """
    sizes = problem.sizes(microbatch_size)
    if len(problem.order) > SHORT:
        yield from PeriodSearch(problem, chain, sizes, known_s).run()
    else:
        yield from thoroughly(problem, chain, sizes, known_s)


def thoroughly(
    problem: Problem, chain: Chain, sizes: Sequence[int], known_s: float = float("inf")
) -> Iterator[Candidate]:
    """Candidates for all of these sizes, also with uneven numbers of replicas if that is quick."""
    for uneven in (False, True)[: 1 + problem.affords_uneven]:
        yield from PeriodSearch(problem, chain, sizes, known_s, THOROUGH, uneven=uneven).run()


def in_a_row(
    problem: Problem, microbatch_size: int | None, found: Sequence[Candidate]
) -> Iterator[Candidate]:
    """Candidates whose stages are runs of the model in one order, beside those ``found`` so far.

    A stage may then be the tail of one branch and the head of the next, which the search over
    branches does not know. Stages wait only for those whose values they read.
    """
    sizes = problem.sizes(microbatch_size)
    known_s = min((candidate.step_s for candidate in found), default=float("inf"))
    chain = line(problem.cost, problem.order, coarse=True)
    if len(problem.order) > SHORT:
        yield from PeriodSearch(problem, chain, sizes, known_s, uneven=False).run()
    else:
        yield from thoroughly(problem, chain, sizes)


def best(
    found: Sequence[Candidate], count: int, always: Sequence[Candidate] = ()
) -> list[Candidate]:
    """The ``count`` candidates of least estimated step, each stage graph once, the least first.

    Of those of one stage, which differ in little, only the best ``SEARCH.alone``. The best of
    ``always`` is kept whatever its estimate.
    """
    ranked = sorted([*found, *always], key=lambda candidate: candidate.step_s)
    unique = list({candidate.graph: candidate for candidate in reversed(ranked)}.values())[::-1]
    alone = [candidate for candidate in unique if len(candidate.graph) == 1]
    kept = [candidate for candidate in unique if candidate not in alone[SEARCH.alone :]][:count]
    spared = min(always, key=lambda candidate: candidate.step_s, default=None)
    if spared is not None and all(candidate.graph != spared.graph for candidate in kept):
        kept[count - 1 :] = [spared]
    return kept
