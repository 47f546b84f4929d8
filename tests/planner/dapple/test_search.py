"""The recursion against all plans, one by one, and what it does when it may not see them all."""

from collections.abc import Iterator
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.cost import CostModel
from anabranch.cost.nested_sets import Ints
from anabranch.errors import BudgetError
from anabranch.graph.opgraph import Op, OpGraph, Parameter, Value
from anabranch.planner.dapple.placement import Machines
from anabranch.planner.dapple.planner import placed
from anabranch.planner.dapple.search import LABEL, ChainPlan, PlacementSearch, best_of_groups
from anabranch.planner.dapple.tables import RunTables
from anabranch.planner.toolkit.budget import Budget
from anabranch.planner.toolkit.problem import Problem
from anabranch.plans.check import check
from anabranch.plans.stages import StageGraph
from anabranch.profile.profile import OpCost, Profile
from tests.planner.dapple.latency import latency
from tests.planner.helpers import cost_model
from tests.strategies import planning_profiles

PLENTY = 10**7


def tables_of(cost: CostModel, batch_size: int, size: int, *, overlap: bool = False) -> RunTables:
    problem = Problem(cost, batch_size, any_degree=True)
    return RunTables(problem.row, problem.prices(size), overlap)


def search(
    tables: RunTables, *, width: int | None = None, budget: Budget | None = None
) -> list[ChainPlan]:
    machines = Machines(tables.row.cost.cluster)
    budget = budget or Budget("dapple", PLENTY, "")
    return PlacementSearch(tables, machines, budget, width=width).run()


def chain_profile(count: int, weights: int = 4) -> Profile:
    """Operators of 1 s per sample and direction with 4 bytes per sample between them."""
    graph = OpGraph(
        tuple(Op(f"op{i}", (f"w{i}",)) for i in range(count)),
        tuple(Value(i, (j,), 4) for i, j in pairwise(range(count))),
        tuple(Parameter(f"w{i}", weights) for i in range(count)),
    )
    costs = tuple(OpCost((1.0,), (1.0,), 0) for _ in range(count))
    return Profile(graph, (1,), costs, "v100", "imported", proportional=True)


def everything(tables: RunTables) -> Iterator[StageGraph]:
    """Every plan: all cuts, all numbers of replicas, all outcomes of the policies."""
    machines = Machines(tables.row.cost.cluster)
    count = len(tables.row) - 1

    def ways(state: int, stages: int) -> Iterator[list[Ints]]:
        if stages == 1:
            yield []
            return
        for step in machines.steps(state):
            for rest in ways(step[0], stages - 1):
                yield [step, *rest]

    for stages in range(1, min(count, machines.cluster.num_devices) + 1):
        for cuts in combinations(range(1, count), stages - 1):
            for steps in ways(0, stages):
                devices = machines.devices(steps)[::-1]
                chain = ChainPlan(0.0, (0, *cuts, count), tuple(devices))
                if all(len(stage) in tables.prices.degrees for stage in devices):
                    yield placed(tables, chain)


@given(
    profile=planning_profiles(6, series_parallel=False, max_bytes=40),
    shape=st.sampled_from([(4, 4), (4, 2), (4, 1), (6, 3), (3, 1)]),
    overlap=st.booleans(),
    memory=st.sampled_from([250, 600, 10**9]),
    card=st.sampled_from([2.0, 30.0]),
    size=st.sampled_from([2, 4, 8]),
)
def test_equals_the_best_of_all_plans(profile, shape, overlap, memory, card, size):
    """Small models on up to 6 devices, keeping every suffix: the least L that fits."""
    devices, node = shape
    cost = cost_model(
        profile, devices, node=node, bandwidth=40.0, card=card, latency_s=0.25, memory=memory
    )
    tables = tables_of(cost, 16, size, overlap=overlap)
    found = search(tables)
    plans = [graph for graph in everything(tables) if not check(graph, cost)]
    values = [latency(graph, cost, overlap_allreduce=overlap).total_s for graph in plans]
    if not plans:
        assert not found
        return
    assert found[0].latency_s == pytest.approx(min(values))
    for chain in found:
        graph = placed(tables, chain)
        assert check(graph, cost) == []
        own = latency(graph, cost, overlap_allreduce=overlap).total_s
        assert chain.latency_s == pytest.approx(own)


@given(
    profile=planning_profiles(7, series_parallel=False, max_bytes=40),
    shape=st.sampled_from([(4, 4), (6, 3), (6, 1), (8, 4)]),
    memory=st.sampled_from([250, 600, 10**9]),
)
def test_a_few_suffixes_do_nearly_as_well(profile, shape, memory):
    """Four per ranking: a plan wherever there is one, and within 5% of the best L."""
    devices, node = shape
    cost = cost_model(
        profile, devices, node=node, bandwidth=40.0, card=4.0, latency_s=0.25, memory=memory
    )
    tables = tables_of(cost, 16, 8)
    all_kept, few_kept = search(tables), search(tables, width=4)
    assert bool(all_kept) == bool(few_kept)
    if all_kept:
        assert all_kept[0].latency_s <= few_kept[0].latency_s * (1 + 1e-9)
        assert few_kept[0].latency_s <= 1.05 * all_kept[0].latency_s


def test_best_suffixes_of_each_group_are_kept():
    """By least T_PL, by least estimate, and the one of fewest stages; ties go to the first. In the
    second group one suffix is the best by all three.
    """
    rows = [
        # group, T_PL, estimate, stages
        (0, 3.0, 9.0, 3),  # least T_PL
        (0, 5.0, 8.0, 3),
        (0, 4.0, 7.0, 3),  # least estimate
        (0, 9.0, 9.0, 1),  # fewest stages
        (0, 3.0, 9.0, 3),  # the first once more
        (1, 2.0, 2.0, 2),
        (1, 1.0, 1.0, 1),
    ]
    labels = np.zeros(len(rows), LABEL).view(np.recarray)
    group, labels.closed_s, labels.hoped_s, labels.stages = map(np.array, zip(*rows, strict=True))
    labels.place = np.arange(len(rows))
    assert best_of_groups(labels, group, 1).place.tolist() == [0, 2, 3, 6]
    # Of two per ranking, and one of fewest stages.
    assert best_of_groups(labels, group, 2).place.tolist() == [0, 1, 2, 3, 4, 5, 6]


def test_all_devices_of_a_flat_network_are_alike():
    """One device per machine: 6 of them have 6 states, however many subsets there are."""
    cost = cost_model(chain_profile(6), 6, node=1, bandwidth=40.0, card=4.0)
    machines = Machines(cost.cluster)
    seen, todo = {0}, [0]
    while todo:
        for state in machines.steps(todo.pop())[:, 0].tolist():
            if state not in seen:
                seen.add(state)
                todo.append(state)
    assert len(seen) == 6


def test_heavy_weights_make_a_straight_pipeline():
    """Reducing one operator's weights takes 100 s, its work on a micro-batch 16: no replicas.

    A state that kept only the least T_PL would pair operators on two devices each, because the
    all-reduce of the rest covers up theirs.
    """
    cost = cost_model(chain_profile(6, weights=4000), 6, node=1, bandwidth=40.0, card=40.0)
    best, *_ = search(tables_of(cost, 64, 8), width=1)
    assert [len(stage) for stage in best.devices] == [1] * 6


def test_what_it_would_price_is_bounded():
    """A budget of 100: the message has both numbers and the options."""
    cost = cost_model(chain_profile(12, weights=4000), 8, node=1, bandwidth=40.0, card=40.0)
    with pytest.raises(BudgetError, match=r"steps, its budget is 1e\+02; raise its option budget"):
        search(tables_of(cost, 64, 8), budget=Budget("dapple", 100, "raise its option budget"))
