"""GraphPipe with schedule configurations: a micro-batch size, and a k of kFkB, for every stage.

Operators reach their efficiency at different micro-batch sizes. Stages whose smallest efficient
size is 1, 2 and 4 are all efficient at a uniform 4, but then the first holds 12 samples; with
sizes of their own it holds 10 (GraphPipe, Figure 5)::

    uniform 4     stage 0  12 in flight      stage 1  8      stage 2  4
    1, 2, 4       stage 0  10                stage 1  8      stage 2  4

The objective is the paper's: the seconds per sample of the slowest stage, all-reduce included. For
each largest micro-batch size the least bound on it is found by bisection over the values that
stages can have, each bound asking ``configured_reach`` whether the devices suffice.

Decided where the paper is silent:

- sizes are powers of two, those of one plan within a factor of ``SPAN`` of each other;
- k is searched along with the size, a power of two with ``k * b`` at most the largest size of the
  plan. The paper takes the k with the fewest samples in flight, without saying which of several:
  on chains the largest such k is as good as the search;
- with ``kfkb``, the same stages in groups of two and four times the largest size are proposed too
  where they fit: they hold more, which hides transfers, and only the simulated step tells;
- the least seconds per sample favour large micro-batches and with them long fills. So every
  largest size has its candidates, and so have looser bounds (``LOOSER``).

Files: ``configured_menu`` (configurations and prices), ``configured_shapes``, ``configured_reach``
(states), ``configured_trace`` (stages behind a state), ``configured_plans`` (stage graphs).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from anabranch.planner.partitioner.assemble import Candidate
from anabranch.planner.partitioner.configured_menu import Configs, Menu
from anabranch.planner.partitioner.configured_plans import Finisher
from anabranch.planner.partitioner.configured_reach import ConfiguredReach
from anabranch.planner.partitioner.configured_trace import Chosen, Trace
from anabranch.planner.partitioner.prices import microbatch_sizes
from anabranch.planner.partitioner.search import Problem

BUDGET = 50_000_000
"""States that one bound may take: a few seconds, and about a gigabyte at worst."""

SPAN = 16
"""Largest micro-batch size of a plan over its smallest, at most."""

LOOSER = (1.0, 1.1, 1.3)
"""Bounds that give candidates, as multiples of the least."""

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
    found: list[Candidate] = []
    least = float("inf")
    for largest in [microbatch_size] if microbatch_size else _largest(problem):
        sizes = _sizes(problem, largest) if per_stage_microbatch else [largest]
        if not any(problem.prices(b).degrees for b in sizes):
            continue
        search = Search(problem, sizes, kfkb=kfkb, budget=budget)
        for candidate in search.candidates(HOPELESS * least):
            found.append(candidate)
            least = min(least, candidate.step_s)
    return found


class Search:
    """One largest micro-batch size.

    Args:
        problem: what is to be planned.
        sizes: micro-batch sizes that stages may have.
        kfkb: k may be more than 1.
        budget: states that one bound may take.
    """

    def __init__(self, problem: Problem, sizes: Sequence[int], *, kfkb: bool, budget: int) -> None:
        self._problem = problem
        self._kfkb = kfkb
        self._devices = problem.cost.cluster.num_devices
        prices = [problem.prices(b) for b in sorted(sizes)]
        self._sizes = [each.microbatch_size for each in prices if each.degrees]
        configs = Configs.of(self._sizes, problem.batch_size, kfkb=kfkb)
        menu = Menu([each for each in prices if each.degrees], configs)
        self._menu = menu
        self._reach = ConfiguredReach(problem.chain, menu, devices=self._devices, budget=budget)

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
        if not self._enough(float("inf")):
            return None
        bounds = self._menu.bounds
        low, high = -1, len(bounds) - 1
        while high - low > 1:
            if bounds[high] <= bounds[max(low, 0)] * (1 + self._problem.tolerance) and low >= 0:
                break
            if low >= 0 and bounds[low] > give_up_s:
                return None
            middle = (low + high) // 2
            if self._enough(float(bounds[middle])):
                high = middle
            else:
                low = middle
        return float(bounds[high])

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


def _largest(problem: Problem) -> list[int]:
    """Largest sizes to try."""
    return [b for b in microbatch_sizes(problem.batch_size) if problem.prices(b).degrees]


def _sizes(problem: Problem, largest: int) -> list[int]:
    """Sizes that go with a largest one."""
    powers = [b for b in (1 << i for i in range(largest.bit_length())) if b < largest]
    return [*(b for b in powers if b * SPAN >= largest), largest]
