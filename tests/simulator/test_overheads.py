"""What a calibrated cluster and a measured update add to a step, by hand."""

from dataclasses import replace
from typing import Any

import pytest

from anabranch.cluster import Cluster, Level
from anabranch.cost import CostModel
from anabranch.plans.stages import Stage, StageGraph
from anabranch.profile.profile import UpdateCost
from anabranch.schedule import SCHEDULES, asynchronous
from anabranch.schedule.asynchronous import split_batches
from anabranch.schedule.lower import lower
from anabranch.simulator import stream
from anabranch.simulator.costs import ModelCosts
from anabranch.simulator.run import run
from anabranch.timeline import Timeline
from tests.calibration.examples import calibration
from tests.simulator.helpers import chain, cost_model

NOTHING: dict[str, Any] = {
    "slowdown": (1.0, 1.0),
    "message_s": 0.0,
    "pass_s": 0.0,
    "step_s": 0.0,
    "all_reduce_byte_s": 0.0,
    "memory_bandwidth": 1e30,
}
ROW = StageGraph((Stage(("op0",), (0,), 1), Stage(("op1",), (1,), 1)), ((0, 1),), 1)
FREE = UpdateCost(0.0, 0.0, 0.0)


def machine(devices: int = 2, *hosts: int, **changed: Any) -> Cluster:
    """Free links, and only what is given costs anything."""
    sizes = (devices, *hosts)
    levels = tuple(Level(f"l{i}", n, 1e30, 0.0) for i, n in enumerate(sizes))
    figures = calibration(**{**NOTHING, **changed})
    return Cluster("test", "cpu", 10**9, levels, cores=2, calibration=figures)


def costs(cluster: Cluster, *seconds: float, update: UpdateCost = FREE) -> CostModel:
    """A chain whose forwards and backwards take these seconds; values of 8 bytes."""
    times = list(seconds)
    cost = cost_model(chain(len(times)), times, times, cluster, value_bytes=8, parameter_bytes=4)
    return replace(cost, profile=replace(cost.profile, update=update))


def timeline(graph: StageGraph, cost: CostModel) -> Timeline:
    rule = SCHEDULES["1f1b"]()
    warm = rule.warm_up(graph)
    return run(warm, rule.order(warm), cost)


def starts(found: Timeline) -> dict[str, float]:
    return {str(span.action): span.start for span in found.spans if span.action.kind.is_compute}


def test_both_ends_take_time_for_a_message():
    """A message arrives at once, which takes both of its ends 3 s; the exchange of totals takes as
    much, once for each end::

        device 0   0F sss               rrr 0B | 6 s
        device 1      rrr 1F 1B sss            |
    """
    cost = costs(machine(message_s=3.0), 1.0, 1.0)
    found = timeline(ROW, cost)
    assert starts(found) == pytest.approx({"0F0": 0.0, "1F0": 4.0, "1B0": 5.0, "0B0": 9.0})
    assert found.step_s == pytest.approx(10.0 + 6.0)


def test_telling_totals_takes_turns_on_shared_cores():
    """Four devices on two cores, so all takes twice as long: passes of 2 s, three messages to
    others of 3 s each, and three from them.
    """
    graph = StageGraph(tuple(Stage((f"op{i}",), (i,), 1) for i in range(4)), (), 1)
    cluster = machine(4, message_s=3.0, slowdown=(1.0, 1.0, 1.5, 2.0))
    cost = cost_model((), [1.0] * 4, [1.0] * 4, cluster)
    assert timeline(graph, cost).step_s == pytest.approx(2 * (2 + 6 * 3))


def test_sends_follow_each_other():
    """The second message of a device leaves when the first is handed over, 2 s later."""
    graph = StageGraph(tuple(Stage((f"op{i}",), (i,), 1) for i in range(3)), ((0, 1), (0, 2)), 1)
    cluster = machine(3, message_s=2.0, slowdown=(1.0, 1.0, 1.0))
    cost = cost_model(((0, 1), (0, 2)), [1.0] * 3, [1.0] * 3, cluster, value_bytes=8)
    found = starts(timeline(graph, cost))
    assert (found["1F0"], found["2F0"]) == pytest.approx((3.0, 5.0))


def test_passes_and_steps_have_their_bookkeeping():
    """4 passes of 1 s with .25 each besides, and half a second of the step."""
    cost = costs(machine(pass_s=0.25, step_s=0.5), 1.0, 1.0)
    assert timeline(ROW, cost).step_s == pytest.approx(4 * 1.25 + 0.5)


def test_ranks_of_a_host_slow_each_other():
    """Two replicas side by side take half as long again; on two hosts they do not."""
    graph = StageGraph((Stage(("op0",), (0, 1), 2),), (), 2)
    near = costs(machine(2, slowdown=(1.0, 1.5)), 1.0)
    apart = costs(machine(1, 2, slowdown=(1.0, 1.5)), 1.0)
    assert timeline(graph, near).step_s == pytest.approx(3.0)
    assert timeline(graph, apart).step_s == pytest.approx(2.0)


def test_updates_come_when_all_agree():
    """Stage 1 is done after 3 s, but nobody updates before stage 0 is, after 4: then both do, for
    0.5 + 0.5 * one parameter + 0.25 * 4 bytes = 2 s.
    """
    cost = costs(machine(), 1.0, 1.0, update=UpdateCost(0.5, 0.5, 0.25))
    assert timeline(ROW, cost).step_s == pytest.approx(6.0)


def test_replicas_update_when_they_have_summed():
    """Two replicas: passes of 2 s, a sum over links of 1 byte per second (4 bytes, each half of
    which goes twice), and an update of a second.
    """
    graph = StageGraph((Stage(("op0",), (0, 1), 2),), (), 2)
    cluster = replace(machine(2), levels=(Level("l0", 2, 1.0, 0.0),))
    cost = costs(cluster, 1.0, update=UpdateCost(1.0, 0.0, 0.0))
    assert timeline(graph, cost).step_s == pytest.approx(2.0 + 4.0 + 1.0)


def test_sums_take_time_of_the_backward():
    """Two replicas of 1 + 1 s, whose links are free: a parameter of 4 bytes costs 4 / 4 s."""
    graph = StageGraph((Stage(("op0",), (0, 1), 2),), (), 2)
    cost = costs(machine(all_reduce_byte_s=0.25), 1.0)
    found = timeline(graph, cost)
    assert found.step_s == pytest.approx(2.0 + 1.0)
    assert [span.end - span.start for span in found.spans] == pytest.approx([1.0, 2.0] * 2)


def test_several_stages_of_a_device_update_one_after_the_other():
    """Two stages on one device: 4 s of passes, then two updates of 2 s."""
    graph = StageGraph((Stage(("op0",), (0,), 1), Stage(("op1",), (0,), 1)), ((0, 1),), 1)
    cost = costs(machine(1), 1.0, 1.0, update=UpdateCost(2.0, 0.0, 0.0))
    assert timeline(graph, cost).step_s == pytest.approx(8.0)


@pytest.mark.parametrize("microbatch_size", [1, 2])
def test_messages_that_were_put_in_cost_the_same(microbatch_size: int):
    """A schedule that has its messages already gives the same step, with everything priced."""
    cluster = machine(slowdown=(1.0, 1.25), message_s=0.5, pass_s=0.125, step_s=1.0)
    cost = costs(cluster, 1.0, 2.0, update=UpdateCost(1.0, 0.0, 0.0))
    stages = Stage(("op0",), (0,), 1), Stage(("op1",), (1,), microbatch_size)
    rule = SCHEDULES["1f1b"]()
    warm = rule.warm_up(StageGraph(stages, ((0, 1),), 4))
    prices = ModelCosts(warm, cost)
    lowered = lower(rule.order(warm), warm, prices.message_edges)
    assert run(warm, lowered, prices) == run(warm, rule.order(warm), prices)


def test_the_timeline_has_what_devices_do_besides():
    """Half a second of bookkeeping at first, an update of 2 s at last, nothing of no length."""
    cost = costs(machine(step_s=0.5), 1.0, 1.0, update=UpdateCost(2.0, 0.0, 0.0))
    found = timeline(ROW, cost).overheads
    assert [(span.device, span.what) for span in found] == [
        (0, "bookkeeping"), (0, "update"), (1, "bookkeeping"), (1, "update"),
    ]  # fmt: skip
    times = [time for span in found for time in (span.start, span.end)]
    assert times == pytest.approx([0.0, 0.5, 4.5, 6.5] * 2)


def test_the_bubble_without_a_flush_counts_what_shared_cores_prolong():
    """Two equal stages are busy all the time, half as long again on shared cores: no bubble. It was
    counted from the seconds that one stage takes alone, a third.
    """
    cost = costs(machine(slowdown=(1.0, 1.5)), 1.0, 1.0)
    graph = asynchronous.warm_up(ROW)
    steady = stream.steady(split_batches(graph), ModelCosts(graph, cost))
    assert steady.period_s == pytest.approx(2 * 1.5)
    assert steady.bubble == pytest.approx(0.0, abs=1e-9)
