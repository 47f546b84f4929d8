"""Operators cross the borders of stages where that makes the slowest quicker."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.cluster import Cluster, Level
from anabranch.cost import CostModel
from anabranch.graph.opgraph import Op, OpGraph, Value
from anabranch.graph.series_parallel import decompose, operators
from anabranch.planner.partitioner.borders import moved
from anabranch.planner.toolkit.parts import Part, PartPrices, edges
from anabranch.planner.toolkit.prices import Prices
from anabranch.profile.profile import OpCost, Profile
from tests.planner.helpers import cost_model
from tests.strategies import planning_profiles


def row(seconds: list[int]) -> PartPrices:
    """A chain of operators with these seconds per sample."""
    n = len(seconds)
    graph = OpGraph(
        tuple(Op(f"op{i}") for i in range(n)), tuple(Value(i, (i + 1,), 0) for i in range(n - 1))
    )
    costs = tuple(OpCost((float(s),), (0.0,), 0) for s in seconds)
    profile = Profile(graph, (1,), costs, device="cpu", source="measured", proportional=True)
    cluster = Cluster("flat", "cpu", 10**9, (Level("node", 4, 1e9, 0.0),))
    return PartPrices(Prices(CostModel(profile, cluster), 4, 1, (1,), 1e9))


def test_the_slow_stage_gives_operators_away():
    """Five seconds and one: two operators change over, one after the other."""
    found = moved(row([1, 1, 1, 1, 1, 1]), [Part(0b011111, 1), Part(0b100000, 1)])
    assert [part.mask for part in found] == [0b000111, 0b111000]


def test_nothing_moves_where_nothing_gets_quicker():
    """A stage keeps its only operator, and an even split stays."""
    for parts in ([Part(0b01, 1), Part(0b10, 1)], [Part(0b11, 1)]):
        assert moved(row([5, 1]), parts) == parts


@settings(max_examples=60, deadline=None)
@given(planning_profiles(9, series_parallel=False), st.data())
def test_moves_are_valid_and_never_slower(profile, data):
    """Any contiguous cut of any graph: a partition in topological order, no longer than before."""
    cost = cost_model(profile, 4, bandwidth=9.0)
    prices = PartPrices(Prices(cost, 8, 2, (1, 2), 1e9))
    order = list(operators(decompose(cost.graph)))
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, len(order) - 1)), max_size=3)))
    cuts = [c for c in cuts if c < len(order)]
    ends = [0, *cuts, len(order)]
    parts = [
        Part(sum(1 << op for op in order[i:j]), data.draw(st.sampled_from([1, 2])))
        for i, j in pairwise(ends)
    ]
    found = moved(prices, parts)
    assert sum(part.mask for part in found) == (1 << len(order)) - 1
    assert all(part.mask for part in found)
    assert all(x < y for x, y in edges(prices, found))
    assert max(map(prices.period_s, found)) <= max(map(prices.period_s, parts))
