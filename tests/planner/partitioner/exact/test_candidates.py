"""The exact search against every partition, one by one, and what it is used for."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.cluster import Cluster
from anabranch.cost import CostModel
from anabranch.graph.opgraph import Op, OpGraph, Value
from anabranch.planner.exhaustive import best_replicas
from anabranch.planner.partitioner.chains import build
from anabranch.planner.partitioner.exact.candidates import AllPartitions, with_exact
from anabranch.planner.partitioner.exact.lattice import Lattice
from anabranch.planner.partitioner.exact.prices import LatticeWeights
from anabranch.planner.partitioner.exact.size_candidates import SizeCandidates
from anabranch.planner.partitioner.period_search import candidates
from anabranch.planner.partitions import partitions
from anabranch.planner.toolkit.parts import Part, PartPrices, edges, heights
from anabranch.planner.toolkit.prices import Bound
from anabranch.planner.toolkit.problem import Problem
from anabranch.plans.check import check
from anabranch.profile.profile import OpCost, Profile
from anabranch.profile.readers import read_profile
from tests.planner import shapes
from tests.planner.helpers import cost_model
from tests.shared_profiles import SHARED, needs_shared
from tests.strategies import planning_profiles

UNBOUNDED = Bound(math.inf)
LIMITS = {"compute": {}, "links": {"bandwidth": 3.0}, "memory": {}}


def problem_of(cost: CostModel, batch_size: int) -> Problem:
    """What is planned; the structure of the graph plays no part."""
    return Problem(cost, batch_size, tolerance=1e-3)


def fronts(cost: CostModel, batch_size: int, size: int) -> list[tuple[int, float]]:
    """(stages on the longest path, longest period) of the plans that the search finds."""
    problem = problem_of(cost, batch_size)
    prices = PartPrices(problem.prices(size))
    found = []
    for parts in SizeCandidates(problem, exact_of(problem).weights, size).front(UNBOUNDED):
        found.append((depth(prices, parts), max(prices.period_s(part) for part in parts)))
    return found


def exact_of(problem: Problem) -> AllPartitions:
    """The search for a graph of any structure."""
    groups = tuple(1 << i for i in range(len(problem.cost.graph)))
    lattice = Lattice(problem.cost.graph, budget=1000, ways=100_000)
    return AllPartitions(problem, LatticeWeights(problem.cost, lattice, groups), alone=True)


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


def test_leaves_large_models_to_others():
    """The papers' models have too many downsets."""
    assert AllPartitions.of(problem_of(cost_model(shapes.mmt(), 4), 64)) is None


def ladder(rungs: int) -> Profile:
    """Two chains of operators; each rung of the first is read by the same of the second."""
    ops = tuple(Op(f"{side}{i}") for i in range(rungs) for side in "ab")
    values = tuple(
        Value(2 * i, tuple(sorted({2 * i + 1, *([2 * i + 2] if i < rungs - 1 else [])})), 1)
        for i in range(rungs)
    ) + tuple(Value(2 * i + 1, (2 * i + 3,), 1) for i in range(rungs - 1))
    costs = tuple(OpCost((1.0 + i % 3,), (2.0,), 1) for i in range(2 * rungs))
    return Profile(OpGraph(ops, values), (1,), costs, "cpu", "measured", proportional=True)


def test_puts_operators_together_where_there_are_too_many():
    """A ladder of 15 rungs has 136 downsets, one of 40 has 861: 8 are left per device."""
    few, many = (AllPartitions.of(problem_of(cost_model(ladder(n), 16), 64)) for n in (15, 40))
    assert len(few.weights.lattice.downsets) == 136
    assert len(few.weights.atoms) == 30
    assert len(many.weights.lattice.downsets) <= 128
    assert few.alone
    for partitioned in (few, many):
        found = min(partitioned.candidates(4), key=lambda candidate: candidate.period_s)
        assert check(found.graph, partitioned.problem.cost) == []
        # all work shared out evenly
        costs = partitioned.problem.cost.profile.costs
        least = sum(sum(c.forward_s + c.backward_s) for c in costs) / 16
        assert found.period_s <= 1.35 * 4 * least


def test_a_coarse_search_is_not_alone():
    """On a few operators per device, what is put together is as much as a device computes."""
    wide = [*((0, i) for i in range(1, 13)), *((i, 13) for i in range(1, 13))]
    ops = tuple(Op(f"op{i}") for i in range(14))
    # With these it is not series-parallel.
    across = [(1, 3), (1, 4), (2, 4)]
    graph = OpGraph(ops, tuple(Value(a, (b,), 0) for a, b in (*wide, *across)))
    costs = tuple(OpCost((1.0,), (2.0,), 1) for _ in ops)
    profile = Profile(graph, (1,), costs, "cpu", "measured", proportional=True)
    many, few = (AllPartitions.of(problem_of(cost_model(profile, d), 16)) for d in (14, 2))
    assert (many.alone, few.alone) == (False, True)
    chain = build(many.problem.cost, many.problem.tree)
    found = {c.graph for c in with_exact(many.problem, chain, 4)}
    assert found > {c.graph for c in many.candidates(4)}


@needs_shared
@pytest.mark.parametrize(
    ("name", "downsets"),
    [
        ("pipedream/gnmt/graph.txt", 35),
        ("piper/gnmt.json", None),
        ("dapple/amoeba-6-pbs-8-complicated.txt", 53),
    ],
)
def test_published_profiles(name, downsets):
    """Graphs that are not series-parallel lose nothing; the reader leaves one that is."""
    profile = next(read_profile(path) for path in SHARED.rglob("*") if str(path).endswith(name))
    problem = problem_of(CostModel(profile, Cluster.preset("summit:2x4")), 64)
    exact = AllPartitions.of(problem)
    assert (exact and len(exact.weights.lattice.downsets)) == downsets
    if exact is not None:
        ours = min(candidate.period_s for candidate in exact.candidates(8))
        chain = build(problem.cost, problem.tree)
        others = min(candidate.period_s for candidate in candidates(problem, chain, 8))
        assert ours <= others * (1 + 1e-9)
