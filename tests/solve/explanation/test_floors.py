"""Floors of a step, by eye and against any simulated step."""

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from anabranch.cost import CostModel
from anabranch.plans.stages import StageGraph
from anabranch.profile.profile import OpCost
from anabranch.schedule import compute_order
from anabranch.simulator.costs import ModelCosts
from anabranch.simulator.run import simulate
from anabranch.solve.bound import step_bound, work_floor
from anabranch.solve.explanation.floors import Floor, floors
from tests.simulator.helpers import chain, cluster, cost_model, priced_stage_graphs, stage_graph
from tests.simulator.test_overheads import machine
from tests.solve.helpers import a_plan
from tests.strategies import planning_profiles


def floors_of(graph: StageGraph, cost: CostModel) -> list[Floor]:
    """Floors of any plan, then those of this one."""
    return list(floors(graph, ModelCosts(graph, cost)))


def test_floors_of_any_plan():
    """8 samples of a chain of 1 + 2 and 3 + 4 seconds on 4 devices: 10 s each, 20 s on each device.

    The larger operator alone takes 14 s on them. One sample takes 4 s forward, then gradients of
    the inputs of the second operator, half of its backward, then the backward of the first: 8 s.
    """
    cost = cost_model(chain(2), [1, 3], [2, 4], cluster(4))
    found = floors_of(stage_graph(chain(2), [(0, 1), (2, 3)], 8, [2, 2]), cost)[:3]
    assert [(floor.kind, floor.seconds) for floor in found] == [
        ("work", 20.0),
        ("largest_operator", 14.0),
        ("longest_path", 8.0),
    ]
    assert found[1].what == "op1, over 4"
    assert all(floor.any_plan for floor in found)


def test_the_bound_of_devices_that_share_cores_is_not_below_the_floor_of_their_work():
    """Two devices with one core compute as much as one: 8 samples of 10 s take 80 s, not 40."""
    graph = stage_graph(chain(2), [(0,), (1,)], 8, [2, 2])
    alone = cost_model(chain(2), [1, 3], [2, 4], cluster(2))
    shared = replace(alone, cluster=machine(2, slowdown=(1.0, 2.0)))
    assert step_bound(alone, 8) < 60.0
    (work, *_) = floors_of(graph, shared)
    assert work.seconds == step_bound(shared, 8) == 80.0


def test_work_is_priced_where_a_sample_takes_least():
    """1 s for 1 sample, 1.5 s for 4 of them: 8 samples are two slices of 4, not eight of 1."""
    cost = cost_model((), [1], [0], cluster(1))
    measured = replace(
        cost.profile, samples=(1, 4), costs=(OpCost((1.0, 1.5), (0.0, 0.0), 0),), proportional=False
    )
    assert work_floor(replace(cost, profile=measured), 8) == pytest.approx(3.0)
    assert work_floor(replace(cost, profile=measured), 1) == 1.0


@given(planning_profiles(), st.integers(1, 16))
def test_no_slice_is_below_the_work_floor(profile, batch_size):
    """Of sizes that were measured or lie between, up to the batch."""
    cost = CostModel(profile, cluster(1))
    least = work_floor(cost, batch_size)
    for samples in range(1, min(batch_size, 8) + 1):
        seconds = sum(float(direction.sum()) for direction in cost.op_seconds(samples))
        assert least <= seconds * batch_size / samples * (1 + 1e-9)


def test_the_longest_path_of_branches_is_the_longer_one():
    """Two branches of 2 and 5 seconds meet in one of 1 second."""
    edges = ((0, 2), (1, 2))
    cost = cost_model(edges, [1, 2, 1], [1, 3, 0], cluster(3))
    graph = stage_graph(edges, [(0,), (1,), (2,)], 4)
    assert {f.kind: f.seconds for f in floors_of(graph, cost)}["longest_path"] == 6.0


def test_a_path_is_of_the_quickest_slice():
    """Measured at 1 and 2 samples as 5 and 3 s: a slice of both is through in 3 s."""
    cost = cost_model((), [1], [0], cluster(1))
    costs = (OpCost((5.0, 3.0), (0.0, 0.0), 0),)
    cost = replace(
        cost, profile=replace(cost.profile, samples=(1, 2), costs=costs, proportional=False)
    )
    graph = stage_graph((), [(0,)], 2, [2])
    assert {f.kind: f.seconds for f in floors_of(graph, cost)}["longest_path"] == 3.0


def test_the_busiest_link_carries_messages_and_sums():
    """Two branches of 4 samples send 8 bytes into device 2 at 2 bytes/s, and take as many back."""
    edges = ((0, 2), (1, 2))
    cost = cost_model(edges, [1, 1, 1], [1, 1, 1], cluster(3, bandwidth=2.0), value_bytes=1)
    graph = a_plan(stage_graph(edges, [(0,), (1,), (2,)], 4)).stage_graph
    (found,) = (floor for floor in floors_of(graph, cost) if floor.kind == "busiest_link")
    assert found.seconds == 4.0
    assert found.what.endswith(" device 2")


@pytest.mark.parametrize(("cards", "where"), [(1, "out of node 1"), (2, "out of card 1 of node 1")])
def test_the_busiest_link_may_be_a_card(cards, where):
    """Devices 6 and 7, on the second node, send 8 bytes each to the first at 2 bytes/s."""
    edges, machines = ((0, 2), (1, 3)), cluster(4, 2, bandwidth=2.0, cards=cards)
    cost = cost_model(edges, [1] * 4, [1] * 4, machines, value_bytes=2)
    graph = a_plan(stage_graph(edges, [(6,), (7,), (0,), (1,)], 4)).stage_graph
    (found,) = (floor for floor in floors_of(graph, cost) if floor.kind == "busiest_link")
    assert (found.seconds, found.what) == (8.0, where)


def test_all_reduces_of_the_plan_and_of_data_parallelism():
    """Stage 0 sums 6 bytes over two devices, 1 byte/s: 6 s. Data parallelism sums 12 over three."""
    cost = cost_model(chain(2), [1, 1], [1, 1], cluster(3, bandwidth=1.0), parameter_bytes=6)
    graph = a_plan(stage_graph(chain(2), [(0, 1), (2,)], 2, [2, 2])).stage_graph
    found = [floor for floor in floors_of(graph, cost) if floor.kind.endswith("all_reduce")]
    assert [(f.kind, f.seconds) for f in found] == [
        ("all_reduce", 6.0),
        ("data_parallel_all_reduce", pytest.approx(16.0)),
    ]
    assert found[0].what == "6 B over devices 0-1"


@given(priced_stage_graphs())
def test_no_step_is_below_its_floors(drawn):
    """Whatever the plan; profiles in proportion, so that slices do not matter."""
    graph, cost, schedule = drawn
    assume(all(stage.microbatch_size >= stage.replicas for stage in graph.stages))
    step = simulate(graph, compute_order(graph, schedule), ModelCosts(graph, cost))
    for floor in floors_of(graph, cost):
        if floor.kind != "data_parallel_all_reduce":
            assert floor.seconds <= step.end * (1 + 1e-9)
