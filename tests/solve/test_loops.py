"""Stages that share devices, found by planner auto: rows that pass the devices several times."""

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from anabranch.cost import CostModel
from anabranch.errors import InvalidPlanError
from anabranch.files.plans import load_plan, save_plan
from anabranch.plans.plan import Plan
from anabranch.plans.stages import Stage, StageGraph
from anabranch.schedule import SCHEDULES
from anabranch.simulator.judge import Judge
from anabranch.simulator.objective import ShortestStep
from anabranch.solve import check_plan, plan, simulate
from anabranch.solve.bound import step_bound
from anabranch.solve.schedule_choice import LOOP_SCHEDULES, best_loop, least_bounds
from tests.simulator.helpers import chain, cluster, cost_model, stage_graph


def row(count: int, devices: int, **options) -> CostModel:
    """Equal operators in a row, 1 s forward and 2 s backward; sums of replicas take for ever."""
    machines = cluster(devices, bandwidth=1e3, **options)
    return cost_model(
        chain(count),
        [1.0] * count,
        [2.0] * count,
        machines,
        parameter_bytes=1 << 20,
        kept_bytes=1 << 20,
    )


def planned(cost: CostModel, batch_size: int, **options) -> Plan:
    return plan(cost.profile, cost.cluster, batch_size, **{"microbatch_size": 1, **options})


def rows_on_devices(cost: CostModel, batch_size: int) -> Iterator[StageGraph]:
    """Every partition of a row into stages, and every device for each."""
    count, devices = len(cost.graph), range(cost.cluster.num_devices)
    names = [op.name for op in cost.graph.ops]
    for cuts in product((False, True), repeat=count - 1):
        ends = [i + 1 for i, cut in enumerate(cuts) if cut]
        parts = [names[a:b] for a, b in zip([0, *ends], [*ends, count], strict=True)]
        for places in product(devices, repeat=len(parts)):
            if len({*places}) == len(devices):
                stages = (Stage(tuple(p), (d,), 1) for p, d in zip(parts, places, strict=True))
                yield StageGraph(tuple(stages), tuple(chain(len(parts))), batch_size)


@pytest.mark.parametrize("schedule", ["1f1b", "1f1b-split", "zb-h1"])
@pytest.mark.parametrize(("count", "batch_size"), [(4, 2), (4, 4), (6, 2)])
def test_no_placement_is_shorter(schedule: str, count: int, batch_size: int):
    """Of a row of equal operators on two devices."""
    cost = row(count, 2)
    judge = Judge(ShortestStep(cost, (schedule,)))
    judge.consider(rows_on_devices(cost, batch_size))
    best = planned(cost, batch_size, schedule=schedule)
    assert best.stage_graph.shares_devices
    assert best.predicted.step_s == pytest.approx(judge.best_s, rel=0.01)


def test_the_last_device_begins_sooner():
    """Two devices, two micro-batches, four operators. With two stages a device works 12 s, and the
    second one waits 2 s for the first forward; with a second round 1 s.
    """
    cost = row(4, 2)
    apart = planned(cost, 2, improve=False)
    best = planned(cost, 2)
    assert not apart.stage_graph.shares_devices
    assert best.predicted.step_s <= 13 < apart.predicted.step_s
    assert best.schedule in SCHEDULES


def test_the_plan_is_valid_and_simulated_alike(tmp_path: Path):
    """Also when it was written and read again."""
    cost = row(8, 4)
    best = planned(cost, 4)
    assert best.stage_graph.shares_devices
    assert check_plan(best, cost.profile, cost.cluster) == []
    save_plan(best, tmp_path / "plan.json")
    again = load_plan(tmp_path / "plan.json")
    assert again == best
    step_s = simulate(again, cost.profile, cost.cluster).step_s
    assert step_s == pytest.approx(best.predicted.step_s)


def test_with_many_micro_batches_stages_stay_apart():
    """A second round saves 1 s of 6 x 64."""
    assert not planned(row(4, 2), 64).stage_graph.shares_devices


def test_no_placement_is_shorter_than_the_bound_of_any_plan():
    """The bound of plans with one stage on each device may be longer."""
    cost = row(4, 2)
    judge = Judge(ShortestStep(cost, ("zb-h1",)))
    judge.consider(rows_on_devices(cost, 2))
    assert step_bound(cost, 2, several=True) <= judge.best_s
    best = planned(cost, 2)
    assert best.predicted.bound_s == step_bound(cost, 2, several=True)
    assert "no such plan takes less" in best.summary()
    assert "on 2 devices with up to" in best.summary()


def test_a_search_begins_with_such_a_plan():
    """What it finds is no slower."""
    cost = row(8, 4)
    best = planned(cost, 4)
    again = planned(cost, 4, start=best, planner_options={"evaluations": 0})
    assert again.predicted.step_s <= best.predicted.step_s * (1 + 1e-9)


def test_memory_is_that_of_all_stages_of_a_device():
    """A device has less memory than two stages with their micro-batches need."""
    cost = row(4, 2)
    needed = max(planned(cost, 2).predicted.device_peak_bytes)
    less = replace(cost.cluster, memory_bytes=needed - 1)
    best = planned(replace(cost, cluster=less), 2)
    assert max(best.predicted.device_peak_bytes) < needed


def test_rows_that_do_not_fit_leave_their_places_to_others():
    """Those with the least bounds are simulated, of those that fit under 1F1B: a model with little
    room had only rows with the most replicas tried, of which none fitted.
    """
    cost = row(5, 2)
    needed = max(planned(cost, 2).predicted.device_peak_bytes)
    small = replace(cost, cluster=replace(cost.cluster, memory_bytes=needed - 1))
    near = least_bounds(small, rows_on_devices(cost, 2), math.inf, ("zb-h2",))
    judges = [Judge(ShortestStep(small, ("1f1b",))) for _ in near]
    for judge, graph in zip(judges, near, strict=True):
        judge.consider([graph])
    assert near
    assert all(judge.best is not None for judge in judges)


def test_a_loop_has_to_be_below_the_limit():
    cost = row(4, 2)
    graph = stage_graph(chain(4), [(0,), (1,), (1,), (0,)], 2)
    found, _ = best_loop(cost, [graph], math.inf, LOOP_SCHEDULES)
    assert found is not None
    seconds, best = found
    assert best.proposal == graph
    assert best_loop(cost, [graph], seconds, LOOP_SCHEDULES)[0] is None


def test_lists_are_tried_where_other_schedules_are_well_behind():
    """Operators of 3, 6 and 6 s, of which the second follows the first, on two devices in turn: a
    step takes 15 s with whole backwards, 13 s with split ones, and 9 s as a list.
    """
    cost = cost_model(((0, 1),), [1.0, 2.0, 2.0], [2.0, 4.0, 4.0], cluster(2), value_bytes=0)
    graph = stage_graph(((0, 1),), [(0,), (1,), (0,)], 1)
    found, _ = best_loop(cost, [graph], 10.0, LOOP_SCHEDULES)
    assert found is not None
    assert found[0] == pytest.approx(9.0)


@pytest.mark.parametrize("option", [{"shape": "chain"}, {"several": False}])
def test_a_search_for_other_stages_does_not_begin_with_such_a_plan(option: dict[str, object]):
    """Two branches, each with a stage on both devices: neither in a row, nor one on each."""
    cost = cost_model(
        ((0, 1), (0, 2), (1, 3), (2, 3)), [1.0] * 4, [2.0] * 4, cluster(2), value_bytes=1
    )
    graph = stage_graph(((0, 1), (0, 2), (1, 3), (2, 3)), [(0,), (1,), (0,), (1,)], 4)
    start = Plan(graph, "1f1b", "", "", "", "", 0.0, 0.0, None)
    assert planned(cost, 4, start=start, planner_options={"evaluations": 0})
    with pytest.raises(InvalidPlanError, match="the stages to begin with are"):
        planned(cost, 4, start=start, planner_options={"evaluations": 0, **option})


def test_a_join_is_on_a_device_of_one_of_its_branches():
    """Three branches of 12, 9 and 9 s and a join of .6 s, of one sample on three devices: a stage
    of branch and join would begin the branch when the others have ended.
    """
    work_s = [2.0, 2.0, 1.0, 2.0, 1.0, 2.0, 0.2]
    edges = ((0, 1), (1, 6), (2, 3), (3, 6), (4, 5), (5, 6))
    machines = cluster(3, bandwidth=1e9)
    cost = cost_model(edges, work_s, [2 * s for s in work_s], machines)
    best = planned(cost, 1)
    assert best.stage_graph.shares_devices
    assert best.predicted.step_s == pytest.approx(12.6, rel=1e-3)
