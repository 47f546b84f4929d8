"""Piper's planner: a search per micro-batch size, and a refusal where nothing fits."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from anabranch.cost import CostModel
from anabranch.graph.opgraph import bits
from anabranch.planner.base import require_options
from anabranch.planner.piper.prices import DownsetPairs, DownsetPrices
from anabranch.planner.piper.search import BoundedPlans, LoadSearch
from anabranch.planner.toolkit.downsets import downsets
from anabranch.planner.toolkit.infeasible import explained
from anabranch.planner.toolkit.prices import ROUNDING, Part
from anabranch.planner.toolkit.problem import Problem
from anabranch.plans.stages import StageGraph

_ROW_PAIRS = 1 << 24
"""Most nested pairs of the prefixes of a row; 5,700 operators have this many."""


@dataclass(frozen=True)
class Piper:
    """Dynamic programme over nested downsets; ``planner.piper`` states it.

    Of all lines of convex stages, and for every micro-batch size, one with the least load, to
    ``tolerance``. Time and memory grow with the nested pairs of downsets: a chain of n operators
    has n (n + 1) / 2, k chains side by side about the k-th power of that.

    Attributes:
        max_replicas: replicas per stage at most. None: no limit.
        recompute: stages may recompute.
        linear: only stages that are runs of the operators in one order, branch after branch; needs
            no budget up to 5,700 of them.
        any_degree: numbers of replicas that are no power of two as well.
        tolerance: relative distance to the least load at which its search ends; 0 for none.
        budget: most downsets.
        pairs: most nested pairs of downsets; 16 million take about half a gigabyte.
    """

    max_replicas: int | None = None
    recompute: bool = True
    linear: bool = False
    any_degree: bool = False
    tolerance: float = 1e-3
    budget: int = 20_000
    pairs: int = 16_000_000

    schedules: ClassVar[tuple[str, ...]] = ("1f1b",)

    def __post_init__(self) -> None:
        require_options("piper", self, max_replicas=1, tolerance=0, budget=1, pairs=1)

    def __call__(
        self, cost: CostModel, *, batch_size: int, microbatch_size: int | None = None
    ) -> Iterator[StageGraph]:
        """Propose up to two stage graphs per micro-batch size, as they are found.

        Raises:
            InfeasiblePlanError: if nothing fits; the message says what would.
            BudgetError: if the model has more downsets than ``budget``, or more nested pairs of
                them than ``pairs``.
        """
        problem = Problem(
            cost,
            batch_size,
            microbatch_size,
            self.max_replicas,
            chained=True,
            recompute=self.recompute,
            any_degree=self.any_degree,
        ).checked()
        return explained(problem, self._proposals(problem))

    def _proposals(self, problem: Problem) -> Iterator[StageGraph]:
        cost = problem.cost
        spaces = [DownsetPairs.of(cost, problem.row.sets, _ROW_PAIRS)]
        if not self.linear:
            masks = downsets(cost.graph, self.budget)
            spaces.append(DownsetPairs.of(cost, masks, self.pairs))
        for prices in map(problem.prices, problem.sizes):
            if prices.modes:
                yield from self._graphs(
                    problem, [(DownsetPrices(prices, space.downsets), space) for space in spaces]
                )

    def _graphs(
        self, problem: Problem, searched: list[tuple[DownsetPrices, DownsetPairs]]
    ) -> Iterator[StageGraph]:
        """Generate plans of the least load: with the fewest stages, and on exactly all devices."""
        plans, stages = None, searched[0][0]
        for prices, space in searched:
            # With the load of a row as bound, few nested pairs need a closer look.
            bound_s = plans and plans.load_s / max(1 + self.tolerance, ROUNDING)
            better = least(prices, space, self.tolerance, bound_s=bound_s)
            if better is not None:
                plans, stages = better, prices
        if plans is None:
            return
        few = _assembled(problem, stages, plans, exact=False)
        if few is not None:
            yield few
        whole: BoundedPlans | None = plans
        if not plans.reached(exact=True):
            # ``few`` is None where its stages have no use for the idle devices.
            stages, space = searched[-1]
            whole = None if few else least(stages, space, self.tolerance, exact=True)
        if whole is not None:
            full = _assembled(problem, stages, whole, exact=True)
            if full is not None and full != few:
                yield full


def _assembled(
    problem: Problem, stages: DownsetPrices, plans: BoundedPlans, *, exact: bool
) -> StageGraph | None:
    """Return a plan's stage graph on all devices; None if its stages cannot use them all."""
    options, parts = plans.options, []
    for i in plans.chain(exact=exact):
        mask = stages.downsets.mask(int(options.lo[i]), int(options.hi[i]))
        mode = stages.modes[int(options.mode[i])]
        parts.append(Part(mask, mode.replicas, mode.recompute))
    order = tuple(op for part in parts for op in bits(part.mask))
    candidate = replace(problem.assembler(stages.prices), order=order).assemble(parts)
    return None if candidate is None else candidate.graph


def least(
    stages: DownsetPrices,
    space: DownsetPairs,
    tolerance: float,
    *,
    bound_s: float | None = None,
    exact: bool = False,
) -> BoundedPlans | None:
    """Return the plans of the least load, none above a bound; None if nothing fits.

    Args:
        tolerance: relative distance to the least load that is close enough.
        exact: plans must take all devices rather than some of them.
    """
    search = LoadSearch(
        len(stages.downsets), stages.prices.cost.cluster.num_devices, tolerance, stages.floor_s
    )
    # Without a bound, three rising ones are tried from near the floor.
    first = 2 * stages.floor_s
    for bound in (first, 4 * first, math.inf) if bound_s is None else (bound_s,):
        devices = stages.fewest_devices(space, bound)
        room, _ = search.room(space.pairs.lower, space.pairs.upper, devices)
        kept = room >= devices
        if kept.any():
            options = stages.options(space.pairs[kept], room[kept], bound)
            plans = search.least(options, bound, exact=exact)
            if plans:
                return plans
    return None
