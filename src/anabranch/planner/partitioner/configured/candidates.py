"""GraphPipe with schedule configurations: a micro-batch size, and a k of kFkB, for every stage.

Operators reach their efficiency at different micro-batch sizes. Stages whose smallest efficient
size is 1, 2 and 4 are all efficient at a uniform 4, but then the first holds 12 samples; with
sizes of their own it holds 10 (GraphPipe, Figure 5)::

    uniform 4     stage 0  12 in flight      stage 1  8      stage 2  4
    1, 2, 4       stage 0  10                stage 1  8      stage 2  4

The objective is the paper's: the seconds per sample of the slowest stage, all-reduce included. For
each largest micro-batch size the least bound on it is found by bisection over the values that
stages can have, each bound asking ``configured.reach`` whether the devices suffice.

Decided where the paper is silent:

- sizes are powers of two, those of one plan within a factor of ``SPAN`` of each other;
- k is searched along with the size, a power of two with ``k * b`` at most the largest size of the
  plan. The paper takes the k with the fewest samples in flight, without saying which of several:
  on chains the largest such k is as good as the search;
- with ``kfkb``, the same stages in groups of two and four times the largest size are proposed too
  where they fit: they hold more, which hides transfers, and only the simulated step tells;
- the least seconds per sample favour large micro-batches and with them long fills. So every
  largest size has its candidates, and so have looser bounds (``LOOSER``).

Files: ``configured.prices``, ``configured.menu`` (configurations and what they offer),
``configured.shapes``, ``configured.reach`` (states), ``configured.trace`` (the stages behind a
state), ``configured.plans`` (stage graphs).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from anabranch.planner.partitioner.configured.menu import Configs, Menu
from anabranch.planner.partitioner.configured.plans import Finisher
from anabranch.planner.partitioner.configured.prices import Book
from anabranch.planner.partitioner.configured.reach import ConfiguredReach
from anabranch.planner.partitioner.configured.trace import Chosen, Trace
from anabranch.planner.partitioner.problem import Problem
from anabranch.planner.toolkit.assemble import Candidate
from anabranch.planner.toolkit.prices import microbatch_sizes
from anabranch.plans.stages import StageGraph

BUDGET = 50_000_000
"""States that one bound may take: a few seconds, and about a gigabyte at worst."""

SPAN = 16
"""Largest micro-batch size of a plan over its smallest, at most."""

LOOSER = (1.0, 1.1, 1.3)
"""Bounds that give candidates, as multiples of the least."""

GUESS = 1.25
GUESSES = 4
"""Where the search for the least bound begins, as a multiple of all work shared out evenly; the
next guess is this squared as large. After so many, whether anything fits is asked first.
"""

HOPELESS = 1.5
"""A largest size gets no candidate if its step cannot be within this factor of the best."""


def configured(
    problem: Problem,
    *,
    per_stage_microbatch: bool,
    kfkb: bool,
    microbatch_size: int | None,
    budget: int = BUDGET,
) -> list[Candidate]:
    """Candidates with schedule configurations, in no order; empty if nothing fits.

    Args:
        problem: what is to be planned.
        per_stage_microbatch: stages may have different micro-batch sizes.
        kfkb: stages may alternate groups of more than one micro-batch.
        microbatch_size: only this as the largest size of a plan.
        budget: states that one bound may take.

    Raises:
        BudgetError: if one bound takes more states than that.
    """
    found: dict[StageGraph, Candidate] = {}
    least = float("inf")
    book = None
    for largest in [microbatch_size] if microbatch_size else microbatch_sizes(problem.batch_size):
        sizes = _sizes(largest) if per_stage_microbatch else [largest]
        sizes = [b for b in sizes if problem.prices(b).degrees]
        if not sizes:
            continue
        search = Search(problem, sizes, kfkb=kfkb, budget=budget, book=book)
        book = search.book
        for candidate in search.candidates(HOPELESS * least):
            found.setdefault(candidate.graph, candidate)
            least = min(least, candidate.step_s)
    return list(found.values())


class Search:
    """One largest micro-batch size.

    Args:
        problem: what is to be planned.
        sizes: micro-batch sizes that stages may have; the profile must cover them.
        kfkb: k may be more than 1.
        budget: states that one bound may take.
        book: of an earlier search of the same problem.
    """

    def __init__(
        self,
        problem: Problem,
        sizes: Sequence[int],
        *,
        kfkb: bool,
        budget: int = BUDGET,
        book: Book | None = None,
    ) -> None:
        self._problem = problem
        self._kfkb = kfkb
        self._sizes = tuple(sizes)
        self.book = book or Book(problem.prices, problem.facts)
        self._menu = Menu(self.book, Configs.of(sizes, problem.batch_size, kfkb=kfkb))
        self._reach = ConfiguredReach(
            problem.chain, self._menu, devices=problem.cost.cluster.num_devices, budget=budget
        )

    def candidates(self, give_up_s: float = float("inf")) -> Iterator[Candidate]:
        """Stage graphs at the least bound and looser ones.

        Args:
            give_up_s: none if every step is longer.
        """
        least = self.least_bound(give_up_s / self._problem.batch_size)
        if least is None:
            return
        cost = self._problem.cost
        finisher = Finisher(
            cost, self._problem.order, self._problem.batch_size, self._problem.max_replicas
        )
        seen: set[frozenset[Chosen]] = set()
        for factor in LOOSER:
            stages = self.stages(least * factor)
            for each in (stages, *self._grouped(stages)):
                if frozenset(each) not in seen:
                    seen.add(frozenset(each))
                    yield from finisher.candidates(each)

    def least_bound(self, give_up_s: float = float("inf")) -> float | None:
        """The least seconds per sample of the slowest stage; None if nothing fits, or if it is
        sure to be more than ``give_up_s``.
        """
        below, enough = self._bracket(give_up_s)
        if enough is None:
            return None
        bounds = self._menu.bounds
        low = int(np.searchsorted(bounds, below, side="right")) - 1
        high = int(np.searchsorted(bounds, enough, side="right")) - 1
        tolerance = 1 + self._problem.tolerance
        while high - low > 1 and (low < 0 or bounds[high] > bounds[low] * tolerance):
            if low >= 0 and bounds[low] > give_up_s:
                return None
            middle = (low + high) // 2
            if self._enough(float(bounds[middle])):
                high = middle
            else:
                low = middle
        return float(bounds[high])

    def _bracket(self, give_up_s: float) -> tuple[float, float | None]:
        """A bound that is too tight, and one that is not: from all work shared out evenly."""
        below, bound_s = 0.0, GUESS * self._evenly_s()
        for _ in range(GUESSES):
            if self._enough(bound_s):
                return below, bound_s
            below, bound_s = bound_s, bound_s * GUESS**2
            if below > give_up_s:
                return below, None
        return below, float("inf") if self._enough(float("inf")) else None

    def _evenly_s(self) -> float:
        """Seconds of work per sample in the least costly way, over the devices."""
        least = float("inf")
        for b in self._sizes:
            prices = self.book.parts(b).prices
            for mode in prices.modes:
                n = prices.samples(mode.replicas)
                seconds = sum(prices.cost.op_seconds(n, mode.tensor))
                least = min(least, float(np.sum(seconds)) * mode.devices / b)
        return least / self._problem.cost.cluster.num_devices

    def stages(self, bound_s: float) -> list[Chosen]:
        """The stages with the fewest devices within a bound that allows some."""
        solved = self._reach.solve(bound_s)
        devices = self._reach.fewest(solved)
        assert devices is not None
        return Trace(self._reach).stages(solved, devices)

    def _enough(self, bound_s: float) -> bool:
        return self._reach.fewest(self._reach.solve(bound_s)) is not None

    def _grouped(self, stages: Sequence[Chosen]) -> Iterator[list[Chosen]]:
        """The same in larger groups of equally many samples."""
        largest = max(each.microbatch_size for each in stages)
        for group in (2 * largest, 4 * largest) if self._kfkb else ():
            if group <= self._problem.batch_size:
                yield [replace(each, k=group // each.microbatch_size) for each in stages]


def _sizes(largest: int) -> list[int]:
    """Sizes that go with a largest one."""
    powers = [b for b in (1 << i for i in range(largest.bit_length())) if b < largest]
    return [*(b for b in powers if b * SPAN >= largest), largest]
