"""The exact search against every partition, one by one, and what it is used for."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.cost import CostModel
from anabranch.graph.cuts import decompose, operators
from anabranch.planner.exhaustive import best_replicas, partitions
from anabranch.planner.partitioner.chains import build
from anabranch.planner.partitioner.exact import Exact
from anabranch.planner.partitioner.exact_lattice import Lattice
from anabranch.planner.partitioner.exact_prices import Weights
from anabranch.planner.partitioner.exact_search import ExactSearch
from anabranch.planner.partitioner.parts import Part, PartPrices, edges, heights
from anabranch.planner.partitioner.prices import Bound
from anabranch.planner.partitioner.problem import Problem
from tests.planner.helpers import cost_model
from tests.strategies import planning_profiles

UNBOUNDED = Bound(math.inf)
LIMITS = {"compute": {}, "links": {"bandwidth": 3.0}, "memory": {}}


def problem_of(cost: CostModel, batch_size: int) -> Problem:
    """What is planned; the structure of the graph plays no part."""
    tree = decompose(cost.graph)
    order = tuple(operators(tree))
    devices = cost.cluster.num_devices
    return Problem(cost, build(cost, tree), order, batch_size, devices, False, 1e-3)


def fronts(cost: CostModel, batch_size: int, size: int) -> list[tuple[int, float]]:
    """(stages on the longest path, longest period) of the plans that the search finds."""
    problem = problem_of(cost, batch_size)
    prices = PartPrices(problem.prices(size))
    found = []
    for parts in ExactSearch(problem, exact_of(problem).weights, size).front(UNBOUNDED):
        found.append((depth(prices, parts), max(prices.period_s(part) for part in parts)))
    return found


def exact_of(problem: Problem) -> Exact:
    """The search for a graph of any structure."""
    groups = tuple(1 << i for i in range(len(problem.cost.graph)))
    lattice = Lattice(problem.cost.graph, budget=1000, ways=100_000)
    return Exact(problem, Weights(problem.cost, lattice, groups), alone=True)


def depth(prices: PartPrices, parts: list[Part]) -> int:
    return max(heights(len(parts), edges(prices, parts))) + 1


def least_periods(
    cost: CostModel,
    batch_size: int,
    size: int,
    allowed: Callable[[tuple[int, ...]], bool] = lambda masks: True,
) -> dict[int, float]:
    """Per depth the least period of all partitions that are allowed, one by one."""
    prices = PartPrices(problem_of(cost, batch_size).prices(size))
    least: dict[int, float] = {}
    for masks in (masks for masks, _ in partitions(cost) if allowed(masks)):
        parts = best_replicas(prices, masks, cost.cluster.num_devices)
        if parts is not None:
            deep = depth(prices, parts)
            period = max(prices.period_s(part) for part in parts)
            least[deep] = min(least.get(deep, math.inf), period)
    return least


@settings(max_examples=150, deadline=None)
@given(
    st.booleans().flatmap(lambda sp: planning_profiles(6, series_parallel=sp)),
    st.integers(1, 6),
    st.sampled_from([1, 2, 4, 8]),
    st.integers(1, 3),
    st.sampled_from(sorted(LIMITS)),
    st.integers(8, 80),
)
def test_finds_the_front_of_all_partitions(profile, devices, size, count, limit, memory):
    """Period and depth, whatever limits them, on any graph: none better, and none missing."""
    tight = {"memory": memory} if limit == "memory" else {}
    cost = cost_model(profile, devices, **LIMITS[limit], **tight)
    wanted: list[tuple[int, float]] = []
    for deep, period in sorted(least_periods(cost, size * count, size).items()):
        if not wanted or period < wanted[-1][1] * (1 - 1e-9):
            wanted.append((deep, period))
    found = fronts(cost, size * count, size)[::-1]
    assert [deep for deep, _ in found] == [deep for deep, _ in wanted]
    assert [period for _, period in found] == pytest.approx([p for _, p in wanted], rel=1e-9)
