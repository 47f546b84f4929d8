"""The strongest plan without branches, against every contiguous cut of the same order."""

from __future__ import annotations

import math
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.cluster import Cluster
from anabranch.cost import CostModel
from anabranch.errors import InfeasiblePlanError
from anabranch.planner.exhaustive import best_replicas
from anabranch.planner.partitioner.chains import line
from anabranch.planner.partitioner.period_search import PeriodSearch
from anabranch.planner.sequential import Sequential
from anabranch.planner.toolkit.parts import Part, PartPrices, fits
from anabranch.plans.check import check
from anabranch.simulator.judge import Judge
from anabranch.simulator.objective import ShortestStep
from anabranch.solve import AUTO, plan
from tests.planner import shapes
from tests.planner.helpers import cost_model
from tests.strategies import planning_profiles


@settings(max_examples=60, deadline=None)
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
    problem = Sequential(recompute=False).problem(cost, size * count)
    found, _ = PeriodSearch(problem, line(cost, problem.order), [size]).least(1e-9)
    prices = PartPrices(problem.prices(size))
    n = len(problem.order)
    least = math.inf
    for k in range(min(n, devices)):
        for cuts in combinations(range(1, n), k):
            ends = [0, *cuts, n]
            masks = [sum(1 << op for op in problem.order[i:j]) for i, j in pairwise(ends)]
            least = min(least, best_chain(prices, masks, devices))
    assert found == pytest.approx(least, rel=1e-6)


def best_chain(prices: PartPrices, masks: list[int], devices: int) -> float:
    """The least period of these stages with any replicas, at the heights of a chain."""
    options = [[Part(mask, degree) for degree in prices.microbatch.degrees] for mask in masks]
    bounds = sorted({prices.period_s(part) for stage in options for part in stage})
    chain = {(s, s + 1) for s in range(len(masks) - 1)}
    for bound in bounds:
        chosen = []
        for s, stage in enumerate(options):
            height = len(masks) - 1 - s
            good = [
                part
                for part in stage
                if prices.period_s(part) <= bound and prices.headroom(part) >= height
            ]
            chosen += good[:1]
        if len(chosen) == len(masks) and sum(part.replicas for part in chosen) <= devices:
            assert fits(prices, chosen, chain)
            return bound
    return math.inf


def test_stages_follow_one_another():
    """Also where no value flows: an edge from each stage to the next, besides those of the data."""
    cost = CostModel(shapes.mmt(parts=1), Cluster.preset("summit:2x4"))
    for graph in Sequential()(cost, batch_size=128):
        assert {(s, s + 1) for s in range(len(graph) - 1)} <= set(graph.edges)
        assert graph.depth == len(graph)


@settings(max_examples=25, deadline=None)
@given(
    planning_profiles(6, series_parallel=False),
    st.integers(1, 6),
    st.integers(1, 8),
    st.sampled_from([100, 10**9]),
)
def test_what_lies_near_is_a_chain_as_well(profile, devices, batch_size, memory):
    """Neighbours of its plans are valid, and every stage waits for the one before it."""
    cost = cost_model(profile, devices, memory=memory, bandwidth=9.0)
    try:
        proposals = Sequential()(cost, batch_size=batch_size)
    except InfeasiblePlanError:
        return
    near = Sequential().neighbourhood(cost, batch_size, None)
    for graph in (changed for proposal in proposals[:3] for changed in near(proposal)):
        assert check(graph, cost) == []
        assert set(pairwise(range(len(graph)))) <= set(graph.edges)


def test_is_improved_where_the_network_is_slow():
    """Seven towers on eight devices: of its own proposals none is the quickest chain."""
    profile, cluster = shapes.candle_uno(), Cluster.preset("dapple-b:8")
    cost = CostModel(profile, cluster)
    proposals = Sequential()(cost, batch_size=128)
    judge = Judge(ShortestStep(cost, AUTO))
    judge.consider(proposals)
    found = plan(profile, cluster, 128, planner="sequential")
    assert found.predicted.step_s < 0.995 * judge.best_s
    assert found.stage_graph.depth == len(found.stage_graph)


def test_straight_pipeline():
    """One device per stage, as many stages as devices."""
    cost = CostModel(shapes.mmt(parts=1), Cluster.preset("summit:2x4"))
    for graph in Sequential(max_replicas=1)(cost, batch_size=128):
        assert [stage.replicas for stage in graph.stages] == [1] * 8


def test_data_parallelism_is_among_the_candidates():
    """Also where it is not among the best."""
    cost = CostModel(shapes.mmt(parts=1), Cluster.preset("summit:8x4"))
    ranked = [len(graph) for graph in Sequential()(cost, batch_size=512, microbatch_size=32)]
    assert ranked.index(1) > 0
    only = Sequential(candidates=1)(cost, batch_size=512, microbatch_size=32)
    assert [len(graph) for graph in only] == [1]


def test_best_replicas_reads_heights_from_the_data():
    """The yardstick of the other planners: two stages without an edge are both at height 0."""
    cost = cost_model(shapes.towers("small", 2, 0, layers=1, top=0), 2, memory=2**40)
    prices = PartPrices(Sequential().problem(cost, 4).prices(1))
    assert best_replicas(prices, (0b0001, 0b1110), 2) == [Part(0b0001, 1), Part(0b1110, 1)]
