"""What every planner must do."""

from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.cost import CostModel
from anabranch.errors import BudgetError, InfeasiblePlanError
from anabranch.graph.opgraph import Parameter
from anabranch.planner import PLANNERS
from anabranch.planner.base import Planner
from anabranch.plans.check import check
from anabranch.plans.stages import StageGraph
from anabranch.profile.profile import Profile
from tests.planner import shapes
from tests.planner.helpers import cost_model
from tests.strategies import planning_profiles

NAMES = sorted(PLANNERS)

QUICK = {name: {"evaluations": 100} for name in ("auto", "chain")}
"""Options that make a planner quick enough for many small cases."""


def planner(name: str, **options: int | None) -> Planner:
    """A planner that takes little time."""
    return PLANNERS[name](**QUICK.get(name, {}), **options)


def propose(name: str, cost: CostModel, **options: int | None) -> list[StageGraph]:
    """All that a planner proposes."""
    return list(planner(name)(cost, **options))


def problems(name: str, graph: StageGraph, cost: CostModel) -> list[str]:
    """What is wrong with a proposal; some that are annealed need replicas that share state."""
    found = check(graph, cost)
    if found and name in QUICK and len(graph) == 1:
        return check(graph, replace(cost, shard_optimizer=True))
    return found


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=12, deadline=None)
@given(
    profile=planning_profiles(5, series_parallel=False),
    devices=st.integers(1, 8),
    batch_size=st.integers(1, 12),
    memory=st.sampled_from([60, 200, 10**9]),
)
def test_proposals_are_valid_and_reproducible(name, profile, devices, batch_size, memory):
    """Any graph, batch and memory: valid proposals, the same twice, or a paragraph why not."""
    cost = cost_model(profile, devices, memory=memory)
    try:
        proposals = propose(name, cost, batch_size=batch_size)
    except InfeasiblePlanError:
        return
    assert proposals
    assert [problems(name, graph, cost) for graph in proposals] == [[] for _ in proposals]
    assert all(stage.in_flight == 0 for graph in proposals for stage in graph.stages)
    assert all(graph.batch_size == batch_size for graph in proposals)
    again = CostModel(replace(cost.profile), cost.cluster, cost.optimizer_factor)
    assert propose(name, again, batch_size=batch_size) == proposals


@st.composite
def odd_profiles(draw: st.DrawFn) -> Profile:
    """Some of: a parameter that all read, operators that take no time, a range that begins at 2
    samples.
    """
    profile = draw(planning_profiles(5, series_parallel=False))
    graph, costs = profile.graph, list(profile.costs)
    if draw(st.booleans()):
        ops = tuple(replace(op, parameters=(*op.parameters, "tied")) for op in graph.ops)
        graph = replace(graph, ops=ops, parameters=(*graph.parameters, Parameter("tied", 4)))
    if draw(st.booleans()):
        nothing = (0.0,) * len(profile.samples)
        for i in draw(st.sets(st.integers(0, len(costs) - 1))):
            costs[i] = replace(costs[i], forward_s=nothing, backward_s=nothing, weight_s=())
    first = draw(st.integers(0, 1))
    return replace(
        profile,
        graph=graph,
        samples=profile.samples[first:],
        costs=tuple(
            replace(
                cost,
                forward_s=cost.forward_s[first:],
                backward_s=cost.backward_s[first:],
                weight_s=cost.weight_s[first:],
            )
            for cost in costs
        ),
    )


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=12, deadline=None)
@given(
    profile=odd_profiles(),
    devices=st.sampled_from([1, 2, 3, 4, 6, 8]),
    batch_size=st.integers(1, 12),
    memory=st.sampled_from([40, 80, 10**9]),
    straight=st.booleans(),
    nodes=st.booleans(),
)
def test_odd_models_are_planned_validly(
    name, profile, devices, batch_size, memory, straight, nodes
):
    """Whatever is odd about model, batch and memory: all proposals valid, or a paragraph why not.

    A batch may be smaller than the number of devices, a stage limited to one replica.
    """
    node = devices // 2 if nodes and devices % 2 == 0 else None
    cost = cost_model(profile, devices, memory=memory, node=node, bandwidth=9.0)
    limited = straight and any(f.name == "max_replicas" for f in fields(PLANNERS[name]()))
    search = planner(name, max_replicas=1) if limited else planner(name)
    try:
        proposals = list(search(cost, batch_size=batch_size))
    except InfeasiblePlanError:
        return
    assert proposals
    for graph in proposals:
        assert problems(name, graph, cost) == []
        assert not limited or all(stage.replicas == 1 for stage in graph.stages)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("what", ["no time", "nothing at all"])
def test_models_that_cost_nothing(name, what):
    """No operator takes time, or weighs anything either: plans, and no division by zero."""
    profile = shapes.towers("small", 2, 1, layers=1, top=1)
    nothing = (0.0,) * len(profile.samples)
    costs = [
        replace(cost, forward_s=nothing, backward_s=nothing, weight_s=()) for cost in profile.costs
    ]
    graph = profile.graph
    if what == "nothing at all":
        costs = [replace(cost, kept_bytes=0) for cost in costs]
        values = tuple(replace(value, nbytes=0) for value in graph.values)
        parameters = tuple(replace(parameter, nbytes=0) for parameter in graph.parameters)
        graph = replace(graph, values=values, parameters=parameters)
    cost = cost_model(replace(profile, graph=graph, costs=tuple(costs)), 4, memory=2**40, node=2)
    with np.errstate(divide="raise", invalid="raise"):
        proposals = propose(name, cost, batch_size=8)
    assert [check(graph, cost) for graph in proposals] == [[] for _ in proposals]


@pytest.mark.parametrize("name", NAMES)
def test_keeps_the_microbatch_size(name):
    """Only the size that was asked for, also if it is no power of two or does not divide."""
    profile = shapes.towers("small", 2, 1, layers=2, top=1)
    for size in (3, 4):
        cost = cost_model(profile, 2, memory=2**40)
        for graph in propose(name, cost, batch_size=8, microbatch_size=size):
            assert {stage.microbatch_size for stage in graph.stages} == {size}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("batch_size", "microbatch_size", "said"),
    [
        *((0, None, "batch"), (8, 0, "batch"), (8, 16, "batch")),
        (2**32, 2**31, "a batch of 1073741824 at most"),
        (2**24, 1, "cut the batch of 16777216 into 16777216; a stage has 8192 at most"),
    ],
)
def test_refuses_wrong_and_extreme_numbers(name, batch_size, microbatch_size, said):
    """A plain ValueError. Files allow extreme ones; what counts them would overflow, or list
    millions.
    """
    cost = cost_model(shapes.towers("small", 1, 1, layers=1, top=1), 2)
    with pytest.raises(ValueError, match=said):
        propose(name, cost, batch_size=batch_size, microbatch_size=microbatch_size)


@pytest.mark.parametrize("name", NAMES)
def test_refuses_a_cluster_of_a_hundred_thousand(name):
    """A table of its pairs of devices has 149 GiB."""
    cost = cost_model(shapes.towers("small", 1, 1, layers=1, top=1), 10**5)
    with pytest.raises((InfeasiblePlanError, BudgetError), match=r"for 8192|64 devices"):
        propose(name, cost, batch_size=10**5)


@pytest.mark.parametrize("name", NAMES)
def test_says_what_memory_would_do(name):
    """A model that fits nowhere: the paragraph has a number of GiB."""
    cost = cost_model(shapes.towers("small", 2, 0, layers=2, top=1), 2, memory=10**6)
    with pytest.raises(InfeasiblePlanError, match=r"needs .*\d GiB"):
        propose(name, cost, batch_size=8)


@pytest.mark.parametrize("name", NAMES)
def test_says_when_the_profile_covers_no_size(name):
    """Profiled from 4 samples on, asked for 2."""
    profile = shapes.towers("small", 1, 0, layers=1, top=1)
    measured = type(profile)(
        profile.graph,
        (4,),
        tuple(type(c)(c.forward_s[2:3], c.backward_s[2:3], c.kept_bytes) for c in profile.costs),
        device="v100",
        source="measured",
    )
    with pytest.raises(InfeasiblePlanError, match="profile"):
        propose(name, cost_model(measured, 2), batch_size=8, microbatch_size=2)


@pytest.mark.parametrize("name", NAMES)
def test_says_how_many_devices_can_be_used(name):
    """Three operators, a batch of 4: more than 12 devices have no work."""
    profile = shapes.towers("small", 1, 0, layers=1, top=0)
    assert len(profile.graph) == 3
    with pytest.raises(InfeasiblePlanError, match="12 of the 16 devices"):
        propose(name, cost_model(profile, 16), batch_size=4)
