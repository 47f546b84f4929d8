"""Better plans for runs that go on, by steps that the simulator makes instead of devices."""

from collections.abc import Mapping
from dataclasses import replace

import pytest

from anabranch.cost import CostModel
from anabranch.plans.plan import Plan
from anabranch.plans.stages import Stage, StageGraph
from anabranch.solve.replanning import Change, Measured, Replanner
from anabranch.solve.simulation import checked_run
from tests.simulator.helpers import chain, cluster, cost_model
from tests.solve.helpers import a_plan

OPERATORS = 8
OPTIONS = {
    "microbatch_size": 1,
    "max_replicas": 1,
    "schedule": "1f1b",
    "planner_options": {"evaluations": 300},
}


def work(*forward_s: float) -> CostModel:
    """A chain with links that cost next to nothing, on two devices."""
    seconds = list(forward_s)
    return cost_model(chain(len(seconds)), seconds, seconds, cluster(2))


def cut(first: int) -> Plan:
    """The first stage has so many operators, the second has the rest."""
    names = [f"op{i}" for i in range(OPERATORS)]
    stages = Stage(tuple(names[:first]), (0,), 1), Stage(tuple(names[first:]), (1,), 1)
    return a_plan(StageGraph(stages, ((0, 1),), 16))


def measured(plan: Plan, truth: CostModel, slower: Mapping[int, float] | None = None) -> Measured:
    """As devices with these costs would take, of which some are slower."""
    timeline = checked_run(plan.stage_graph, plan.schedule, truth, slower)
    return Measured((timeline,), tuple((slower or {}).get(d, 1.0) for d in range(2)))


def sizes(plan: Plan) -> list[int]:
    """Operators of device 0 and of device 1."""
    of = {stage.devices: len(stage.operators) for stage in plan.stage_graph.stages}
    return [of[0,], of[1,]]


def replanner(profiled: CostModel) -> Replanner:
    return Replanner(profiled.profile, profiled.cluster, OPTIONS)


def test_a_plan_that_is_bad_by_its_own_prediction_is_left() -> None:
    """Six of eight equal operators on one device: four each take two thirds of the time."""
    even = work(*[1.0] * OPERATORS)
    change = replanner(even).change(cut(6), measured(cut(6), even))
    assert sizes(change.plan) == [4, 4]
    assert change.then_s < 0.75 * change.now_s


def test_operators_that_take_longer_than_profiled_are_corrected() -> None:
    """The profile says that all are equal, but the last four take three times as long: of sixteen
    units eight are on the first device with four operators of one and one or two of three.
    """
    profiled, truth = work(*[1.0] * OPERATORS), work(*[1.0] * 4, *[3.0] * 4)
    change = replanner(profiled).change(cut(4), measured(cut(4), truth))
    found = [len(stage.operators) for stage in change.plan.stage_graph.stages]
    assert found in ([5, 3], [6, 2])  # on either device, as they are alike
    assert change.then_s < 0.9 * change.now_s


def test_a_slow_device_gets_less() -> None:
    """Of eight equal operators, a device that takes three times as long has two, not four."""
    even, slower = work(*[1.0] * OPERATORS), {1: 3.0}
    change = replanner(even).change(cut(4), measured(cut(4), even, slower))
    assert sizes(change.plan) == [6, 2]
    found = change.plan.stage_graph
    truly = checked_run(found, change.plan.schedule, even, slower)
    assert change.then_s == pytest.approx(truly.period_s)


def test_a_good_plan_stays() -> None:
    """Also where everything takes twice as long as predicted."""
    even, twice = work(*[1.0] * OPERATORS), work(*[2.0] * OPERATORS)
    change = replanner(even).change(cut(4), measured(cut(4), twice))
    assert change.gain_s < 0.01 * change.now_s
    assert not change.repays(10**9, 0.0)


@pytest.mark.parametrize(("first", "slower"), [(6, {}), (4, {1: 3.0})], ids=str)
def test_no_plan_gains_more_than_devices_that_are_always_busy(
    first: int, slower: dict[int, float]
) -> None:
    """Where one is slow, work that leaves it becomes less."""
    even = work(*[1.0] * OPERATORS)
    bad = measured(cut(first), even, slower)
    asked = replanner(even)
    change = asked.change(cut(first), bad)
    assert 0.0 < change.gain_s <= asked.most_gain_s(cut(first), bad)


def test_what_a_change_costs_has_to_be_gained() -> None:
    """One second a step."""
    change = Change(cut(4), now_s=10.0, then_s=9.0)
    assert change.repays(61, cost_s=60.0)
    assert not change.repays(60, cost_s=60.0)
    assert not replace(change, then_s=9.9).repays(10**9, cost_s=60.0)


def test_noise_between_equal_devices_is_none_of_their_speed() -> None:
    assert Measured((), (1.0, 1.1)).slower([4, 7]) == {}
    assert Measured((), (2.0, 4.0, 6.0)).slower([4, 7, 9]) == {4: 0.5, 7: 1.0, 9: 1.5}
