"""Several stages on one device: merged orders keep each stage's own order and never deadlock."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.plans.stages import Stage, StageGraph
from anabranch.schedule import SCHEDULES
from anabranch.schedule.check import check
from anabranch.schedule.lower import lower
from anabranch.schedule.schedule import Schedule
from tests.strategies import stage_graphs


def looped(schedule: str, num_microbatches: int) -> tuple[Schedule, StageGraph]:
    """A chain of four stages on two devices, in turn."""
    stages = tuple(Stage((f"op{s}",), (s % 2,), 1) for s in range(4))
    rule = SCHEDULES[schedule]()
    graph = rule.warm_up(StageGraph(stages, ((0, 1), (1, 2), (2, 3)), num_microbatches))
    return rule.order(graph), graph


def text(schedule: Schedule) -> dict[int, str]:
    return {device: " ".join(map(str, each)) for device, each in schedule.actions.items()}


def test_two_devices_take_turns_with_four_stages() -> None:
    """By hand: device 0 has nothing to do before 3B0 at time 5, so both forwards of stage 2 come
    first; 2B0 can start at 6, and 0B0 when 1B0 is done.
    """
    schedule, _ = looped("1f1b", 2)
    assert text(schedule) == {
        0: "0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1",
        1: "1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1",
    }


def test_a_chain_on_one_device_is_gradient_accumulation() -> None:
    """All can start at once, so earlier samples go first; stage 0 holds two micro-batches and so
    runs its second forward before its first backward.
    """
    stages = tuple(Stage((f"op{s}",), (7,), 2) for s in range(2))
    rule = SCHEDULES["1f1b"]()
    graph = rule.warm_up(StageGraph(stages, ((0, 1),), 4))
    assert text(rule.order(graph)) == {7: "0F0 1F0 1B0 0F1 0B0 1F1 1B1 0B1"}


@pytest.mark.parametrize("name", SCHEDULES)
@given(graph=stage_graphs(max_stages=5, max_replicas=1), data=st.data())
def test_any_placement_is_executable(name: str, graph: StageGraph, data: st.DataObject) -> None:
    """Stages on any of three devices: the checker proves order, pairing, micro-batches in flight
    and freedom from deadlock.
    """
    stages = tuple(
        replace(stage, devices=(data.draw(st.integers(0, 2)),), in_flight=0, k=1)
        for stage in graph.stages
    )
    rule = SCHEDULES[name]()
    graph = rule.warm_up(replace(graph, stages=stages))
    schedule = rule.order(graph)
    check(lower(schedule, graph), graph)
    for s, stage in enumerate(graph.stages):
        alone = [a for a in schedule.actions[stage.devices[0]] if a.stage == s]
        assert len(alone) == 2 * graph.num_microbatches(s)
