"""The search that graphpipe and sequential share: micro-batch sizes, bounds, depths.

For every micro-batch size the least bound on the period is found by bisection, each bound asking
``planner.reach`` for the fewest devices. The bottleneck is not the step, though: a step takes
about ``(M - 1) * period + critical path``, and a plan that is a little slower but half as deep
may win. So at the least bound and some above it, the smallest depth that the devices allow is
taken as well. All of these become candidates, ranked by ``planner.estimate``.

Micro-batch sizes are tried in the order of a lower bound on their steps, and left out once that
is ``HOPELESS`` times the best estimate.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from anabranch.cluster import GIB
from anabranch.cost import CostModel
from anabranch.errors import InfeasiblePlanError
from anabranch.planner.assemble import Assembler, Candidate
from anabranch.planner.chains import Chain, span
from anabranch.planner.parts import Part, PartPrices
from anabranch.planner.prices import Prices, degrees, microbatch_sizes
from anabranch.planner.reach import Reach

LOOSER = (1.0, 1.05, 1.12, 1.25, 1.5, 2.0)
"""Bounds that are tried for smaller depths, as multiples of the least."""

HOPELESS = 1.25
"""A micro-batch size is left out if its step cannot be within this factor of the best estimate."""


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

    def reach(self, prices: Prices, limit: int | None = None) -> Reach:
        """What searches this model at these prices."""
        limit = limit or self.cost.cluster.num_devices
        return Reach(self.chain, prices, limit=limit, heights=min(limit, span(self.chain)))


def candidates(problem: Problem, microbatch_size: int | None) -> list[Candidate]:
    """Candidates for one micro-batch size or all, in no order; empty if nothing fits."""
    sizes = [microbatch_size] if microbatch_size else microbatch_sizes(problem.batch_size)
    ranked = sorted((bound, b) for b in sizes for bound in _least_step(problem, b))
    result: list[Candidate] = []
    best = float("inf")
    for bound, b in ranked:
        if bound > HOPELESS * best:
            break
        found = list(_at_size(problem, b))
        result += found
        best = min([best, *(each.step_s for each in found)])
    return result


def _least_step(problem: Problem, microbatch_size: int) -> Iterator[float]:
    """A lower bound on the step, if the profile covers the size at all."""
    prices = problem.prices(microbatch_size)
    if prices.degrees:
        yield prices.num_microbatches * _least_period(problem, prices)


def _least_period(problem: Problem, prices: Prices) -> float:
    """All work shared out evenly, and no less than the longest operator."""
    work, longest = float("inf"), float("inf")
    for degree in prices.degrees:
        forward, backward = problem.cost.op_seconds(prices.samples(degree))
        work = min(work, float((forward + backward).sum()) * degree)
        longest = min(longest, float((forward + backward).max()))
    return max(work / problem.cost.cluster.num_devices, longest)


def _at_size(problem: Problem, microbatch_size: int) -> Iterator[Candidate]:
    prices = problem.prices(microbatch_size)
    reach = problem.reach(prices)
    assembler = Assembler(PartPrices(prices), problem.order, problem.max_replicas, problem.chained)
    seen: set[frozenset[Part]] = set()
    for parts in _parts(problem, prices, reach):
        key = frozenset(parts)
        if key not in seen:
            seen.add(key)
            candidate = assembler.assemble(parts)
            if candidate is not None:
                yield candidate


def _parts(problem: Problem, prices: Prices, reach: Reach) -> Iterator[list[Part]]:
    """Parts at the least period, and of the least depth at that and at looser bounds."""
    least = least_period(problem, prices, reach)
    if least is None:
        return
    devices = problem.cost.cluster.num_devices
    caps = _caps(reach.heights)
    depths = set()
    for factor in LOOSER:
        found = reach.solve(least * factor, caps)
        feasible = [u for u in range(len(caps)) if found.devices[u] <= devices]
        if factor == 1.0:
            yield found.parts(len(caps) - 1)
        if feasible and feasible[0] not in depths:
            depths.add(feasible[0])
            yield found.parts(feasible[0])


def _caps(heights: int) -> list[int]:
    """Largest heights to try: all small ones, then in steps of about a quarter."""
    caps = [0]
    while caps[-1] < heights - 1:
        caps.append(min(heights - 1, caps[-1] + 1 + caps[-1] // 4))
    return caps


def least_period(problem: Problem, prices: Prices, reach: Reach) -> float | None:
    """The least bound on the period under which the devices suffice; None if none does."""
    devices = problem.cost.cluster.num_devices
    top = [reach.heights - 1]

    def enough(bound: float) -> bool:
        return bool(reach.solve(bound, top).devices[0] <= devices)

    low = _least_period(problem, prices) * (1 - problem.tolerance)
    high = low * 1.25
    while not enough(high):
        if high > low * 1e6 and not enough(float("inf")):
            return None
        low, high = high, high * (1.5 if high < low * 10 else 100)
    while high > low * (1 + problem.tolerance):
        middle = (low * high) ** 0.5
        if enough(middle):
            high = middle
        else:
            low = middle
    return high
