"""Rows of stages that pass the devices several times."""

import math
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from anabranch.cost import CostModel
from anabranch.planner.auto.loops import branches, loops
from anabranch.planner.auto.space import Space
from anabranch.plans.check import check
from anabranch.plans.stages import StageGraph
from tests.simulator.helpers import chain, cluster, cost_model
from tests.strategies import planning_profiles


def space(count: int, devices: int, batch_size: int = 4, **options) -> Space:
    """Equal operators in a row, 1 s forward and 2 s backward."""
    cost = cost_model(chain(count), [1.0] * count, [2.0] * count, cluster(devices))
    options = {"sizes": (1, 2, 4), "most_replicas": devices, **options}
    return Space(cost, batch_size, **options)


def placed(graph: StageGraph) -> str:
    """Operators and devices of the stages, such as ``0 1 on 0, 2 3 on 1``."""
    return ", ".join(
        f"{' '.join(name.removeprefix('op') for name in stage.operators)} on "
        f"{' '.join(map(str, stage.devices))}"
        for stage in graph.stages
    )


def test_stages_pass_the_devices_again_and_there_and_back():
    """Of a row of four on two devices; a second replica has nothing to do of one sample."""
    ways = [placed(g) for g in loops(space(4, 2, sizes=(1,)), math.inf, recompute=False)]
    again, back = "0 on 0, 1 on 1, 2 on 0, 3 on 1", "0 on 0, 1 on 1, 2 on 1, 3 on 0"
    assert ways[:3] == [again, back, "0 on 0, 1 2 on 1, 3 on 0"]


def test_groups_of_devices_are_replicas():
    """Four devices in two groups, or one by one; micro-batches have a sample for each replica."""
    found = [*loops(space(8, 4, batch_size=8), math.inf, recompute=True)]
    assert {len(graph.devices) for graph in found} == {4}
    replicas = {(len(g), g.stages[0].replicas, g.stages[0].microbatch_size) for g in found}
    assert (4, 2, 2) in replicas
    assert (8, 1, 1) in replicas
    assert all(replicas <= size for _, replicas, size in replicas)
    assert all(stage.recompute for graph in found for stage in graph.stages)


def test_replicas_have_a_limit():
    found = loops(space(8, 4, most_replicas=1), math.inf, recompute=False)
    assert {stage.replicas for graph in found for stage in graph.stages} == {1}


def measured(some: Space) -> Space:
    """Of 1 or 2 samples on a device."""
    profile = some.cost.profile
    costs = tuple(
        replace(cost, forward_s=(1.0, 2.0), backward_s=(2.0, 4.0)) for cost in profile.costs
    )
    profile = replace(profile, samples=(1, 2), costs=costs, proportional=False)
    return replace(some, cost=replace(some.cost, profile=profile))


def test_micro_batches_are_those_that_were_measured():
    """Of 2 samples on a device at most; a replica each has one of 2 or two of 4, but of a branch
    each device has all.
    """
    found = loops(measured(space(4, 4, batch_size=8)), math.inf, recompute=False)
    slices = {stage.microbatch_size / stage.replicas for graph in found for stage in graph.stages}
    assert slices == {1, 2}
    cost = cost_model(((0, 2), (1, 2)), [1.0] * 3, [2.0] * 3, cluster(2))
    found = branches(measured(Space(cost, 8, (1, 2, 4), most_replicas=2)), math.inf)
    assert [graph.stages[0].microbatch_size for graph in found] == [1, 2]


def test_devices_compute_less_than_the_limit():
    """Four operators of 3 s on two devices, four samples: 24 s of work on each."""
    assert [*loops(space(4, 2), 24.0, recompute=False)] == []
    assert [*loops(space(4, 2), 24.1, recompute=False)] != []


def test_a_model_of_few_operators_has_no_loop():
    assert [*loops(space(3, 2), math.inf, recompute=False)] == []


def test_branches_are_dealt_out_and_joined_on_one_of_their_devices():
    """Two branches of 4 s and 3 s on two devices, and what joins them, .6 s or with the end of a
    branch 2.6 s, of a work of 7.6 s: where less is done.
    """
    edges = ((0, 1), (1, 3), (2, 3), (3, 4))
    cost = cost_model(edges, [1.0, 1.0, 1.0, 0.2, 0.1], [1.0, 1.0, 2.0, 0.2, 0.1], cluster(2))
    some = Space(cost, 4, (2, 4), most_replicas=2)
    found = [*branches(some, math.inf)]
    assert [placed(graph) for graph in found[::2]] == [
        "0 1 on 0, 2 on 1, 3 4 on 1",
        "2 on 0, 0 on 1, 1 3 4 on 1",
    ]
    assert [graph.stages[0].microbatch_size for graph in found] == [2, 4, 2, 4]
    assert found[0].edges == ((0, 2), (1, 2))
    # The busiest device has 16 s of work with four samples, or 12 s.
    assert len([*branches(some, 16.0)]) == 2
    assert [*branches(some, 12.0)] == []


def test_a_row_has_no_branches():
    assert [*branches(space(4, 2), math.inf)] == []


@given(planning_profiles())
def test_every_deal_of_branches_is_valid(profile):
    """Of any graph of operators, on any devices."""
    for devices in (2, 3):
        cost = CostModel(profile, cluster(devices))
        for graph in branches(Space(cost, 8, (1, 4, 8), most_replicas=devices), math.inf):
            assert check(graph, cost, shared=True) == []
            assert graph.shares_devices


@given(planning_profiles(), st.booleans())
def test_every_one_is_valid(profile, recompute: bool):
    """Of any graph of operators, on any devices."""
    for devices in (2, 4):
        cost = CostModel(profile, cluster(devices))
        some = Space(cost, 8, (1, 2, 4, 8), most_replicas=devices)
        for graph in loops(some, math.inf, recompute=recompute):
            assert check(graph, cost, shared=True) == []
            assert graph.shares_devices


def test_a_loss_across_samples_has_a_stage_of_its_own():
    """With the whole batch, on one of the last stage's devices."""
    cost = cost_model(chain(5), [1.0] * 5, [2.0] * 5, cluster(4))
    graph = cost.profile.graph
    loss = replace(graph.ops[4], whole_batch=True)
    across = replace(graph, ops=(*graph.ops[:4], loss))
    cost = replace(cost, profile=replace(cost.profile, graph=across))
    found = [*loops(Space(cost, 8, (2,), most_replicas=4), math.inf, recompute=False)]
    assert placed(found[0]) == "0 on 0 1, 1 on 2 3, 2 on 0 1, 3 on 2 3, 4 on 2"
    assert [stage.microbatch_size for stage in found[0].stages] == [2, 2, 2, 2, 8]
    assert check(found[0], cost, shared=True) == []
