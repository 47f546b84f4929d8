"""The exact search against every partition, one by one, and what it is used for."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.cost import CostModel
from anabranch.errors import BudgetError
from anabranch.graph.opgraph import bits
from anabranch.planner.exhaustive import best_replicas, partitions
from anabranch.planner.graphpipe import GraphPipe
from anabranch.planner.partitioner.exact import ExactSearch, exact_candidates, exact_weights
from anabranch.planner.partitioner.parts import Part, PartPrices, edges, fits, heights
from anabranch.planner.partitioner.prices import Bound
from tests.planner import shapes
from tests.planner.helpers import cost_model
from tests.strategies import planning_profiles

UNBOUNDED = Bound(math.inf)
LIMITS = {"compute": {}, "links": {"bandwidth": 3.0}, "memory": {}}


def fronts(cost: CostModel, batch_size: int, size: int) -> list[tuple[int, float]]:
    """(stages on the longest path, longest period) of the plans that the search finds."""
    problem = GraphPipe().problem(cost, batch_size)
    prices = PartPrices(problem.prices(size))
    found = []
    for parts in ExactSearch(problem, exact_weights(cost), size).front(UNBOUNDED):
        found.append((depth(prices, parts), max(prices.period_s(part) for part in parts)))
    return found


def depth(prices: PartPrices, parts: list[Part]) -> int:
    return max(heights(len(parts), edges(prices, parts))) + 1


def least_periods(cost: CostModel, batch_size: int, size: int) -> dict[int, float]:
    """Per depth the least period of all partitions, one by one."""
    prices = PartPrices(GraphPipe().problem(cost, batch_size).prices(size))
    least: dict[int, float] = {}
    for masks, _ in partitions(cost):
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
