"""The planner finds the best of the plans that it may express, and what each kind is for."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.cluster import Cluster
from anabranch.cost import CostModel
from anabranch.graph.opgraph import bits
from anabranch.planner.check import check
from anabranch.planner.exhaustive import best_replicas, partitions
from anabranch.planner.graphpipe import GraphPipe
from anabranch.planner.parts import PartPrices
from anabranch.planner.search import Search
from anabranch.planner.sequential import Sequential
from tests.planner import shapes
from tests.planner.helpers import cost_model, expressible
from tests.strategies import planning_profiles


def search_for(cost: CostModel, batch_size: int, size: int, tolerance: float = 1e-9) -> Search:
    search = Search(GraphPipe(tolerance=tolerance).problem(cost, batch_size), size)
    search.narrow(tolerance)
    return search


def least_period(cost: CostModel, batch_size: int, size: int, masks) -> float:
    prices = PartPrices(GraphPipe().problem(cost, batch_size).prices(size))
    least = math.inf
    for partition in masks:
        parts = best_replicas(prices, partition, cost.cluster.num_devices)
        if parts is not None:
            least = min(least, max(prices.period_s(part) for part in parts))
    return least


def ordered(cost: CostModel, masks: tuple[int, ...]) -> tuple[int, ...]:
    """A partition in topological order of its stages."""
    for known, _ in partitions(cost):
        if sorted(known) == sorted(masks):
            return known
    raise AssertionError(f"{masks} is no partition with an acyclic stage graph")


@settings(max_examples=60, deadline=None)
@given(
    planning_profiles(6),
    st.integers(1, 6),
    st.sampled_from([1, 2, 4, 8]),
    st.integers(1, 3),
)
def test_equals_the_best_expressible_plan(profile, devices, size, count):
    """With memory to spare and links that cost nothing but all-reduces, the period is the least."""
    cost = cost_model(profile, devices, bandwidth=4.0 if size > 4 else 1e18)
    if size > 4:
        profile = without_values(profile)
        cost = cost_model(profile, devices, bandwidth=4.0)
    search = search_for(cost, size * count, size)
    chain = GraphPipe().problem(cost, size * count).chain
    known = {tuple(sorted(masks)): masks for masks, _ in partitions(cost)}
    masks = {known[tuple(sorted(masks))] for masks in expressible(chain)}
    assert search.high == pytest.approx(least_period(cost, size * count, size, masks), rel=1e-6)


def without_values(profile):
    """The same with values of no bytes, so that slow links are for all-reduces only."""
    from dataclasses import replace

    values = tuple(replace(value, nbytes=0) for value in profile.graph.values)
    return replace(profile, graph=replace(profile.graph, values=values))
