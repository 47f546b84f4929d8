"""The strongest plan without branches, against every contiguous cut of the same order."""

import math
from itertools import combinations, pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.cluster import Cluster
from anabranch.cost import CostModel
from anabranch.planner import PLANNERS
from anabranch.planner.graphpipe.chains import line
from anabranch.planner.graphpipe.partitioner import partition
from anabranch.planner.graphpipe.schedules import Configuration, Schedules
from anabranch.planner.toolkit.assemble import fits
from anabranch.planner.toolkit.budget import Budget
from anabranch.planner.toolkit.prices import MicrobatchPrices, Part
from anabranch.planner.toolkit.problem import Problem
from tests.planner import shapes
from tests.planner.helpers import cost_model
from tests.strategies import planning_profiles


@given(
    planning_profiles(7, series_parallel=False),
    st.integers(1, 8),
    st.sampled_from([1, 2, 4, 8]),
    st.integers(1, 3),
    st.sampled_from([80, 10**9]),
)
def test_equals_the_best_contiguous_cut(profile, devices, size, count, memory):
    """Every cut of the order, with heights as in a chain: the same least period."""
    cost = cost_model(profile, devices, memory=memory, bandwidth=9.0)
    problem = Problem(cost, size * count, chained=True)
    prices = problem.prices(size)
    n = len(problem.order)
    least = math.inf
    for k in range(min(n, devices)):
        for cuts in combinations(range(1, n), k):
            ends = [0, *cuts, n]
            masks = [sum(1 << op for op in problem.order[i:j]) for i, j in pairwise(ends)]
            least = min(least, best_chain(prices, masks, devices))
    schedules = Schedules((Configuration(size),), (prices,))
    chain = line(cost, problem.order, 64)
    stages = partition(chain, schedules, devices, 1e-9, Budget("graphpipe", 1e9, ""))
    found = max((stage.tps * size for stage in stages), default=math.inf)
    assert found == pytest.approx(least, rel=1e-6)


def best_chain(prices: MicrobatchPrices, masks: list[int], devices: int) -> float:
    """The least longest period of these stages with replicas that use all devices."""
    degrees = prices.degrees
    least = math.inf
    for counts in product(degrees, repeat=len(masks)):
        if sum(counts) == devices:
            parts = [Part(mask, count) for mask, count in zip(masks, counts, strict=True)]
            if fits(prices, parts, {(s, s + 1) for s in range(len(parts) - 1)}):
                least = min(least, max(prices.part_period_s(part) for part in parts))
    return least


def test_stages_follow_one_another():
    """Also where no value flows: an edge from each stage to the next, besides those of the data."""
    cost = CostModel(shapes.mmt(parts=1), Cluster.preset("summit:2x4"))
    for graph in PLANNERS["sequential"]()(cost, batch_size=128):
        assert {(s, s + 1) for s in range(len(graph) - 1)} <= set(graph.edges)
        assert graph.depth == len(graph)


def test_proposes_as_it_searches():
    """Whoever stops after the first plan has it, and who asks again gets all, always the same."""
    cost = CostModel(shapes.mmt(parts=1), Cluster.preset("summit:2x4"))
    first = next(PLANNERS["sequential"]()(cost, batch_size=128))
    found, again = (list(PLANNERS["sequential"]()(cost, batch_size=128)) for _ in range(2))
    assert found[0] == first
    assert again == found
    assert len(found) > 1


def test_straight_pipeline():
    """One device per stage, as many stages as devices."""
    cost = CostModel(shapes.mmt(parts=1), Cluster.preset("summit:2x4"))
    for graph in PLANNERS["sequential"](max_replicas=1)(cost, batch_size=128):
        assert [stage.replicas for stage in graph.stages] == [1] * 8
