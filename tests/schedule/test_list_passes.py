"""Passes by number, scheduled in a list; and the orders of several stages merged on one device."""

import sys
from dataclasses import replace
from importlib import import_module

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.plans.stages import Stage, StageGraph
from anabranch.schedule import SCHEDULES
from anabranch.schedule.check import check
from anabranch.schedule.gpipe import GPipe
from anabranch.schedule.list_passes import ListPasses, lengths_of
from anabranch.schedule.lower import lower
from anabranch.schedule.schedule import Schedule
from anabranch.schedule.zero_bubble import ZeroBubble
from anabranch.simulator.costs import StageTimes
from anabranch.simulator.run import run
from tests.simulator.helpers import chain, stage_graph
from tests.strategies import stage_graphs

ROW = stage_graph(chain(3), [(i,) for i in range(3)], 6)
DIAMOND = stage_graph(((0, 1), (0, 2), (1, 3), (2, 3)), [(0, 1), (2,), (3,), (0, 1)], 9, [2] * 4)


def uneven(graph):
    """Stages of unequal lengths, with messages."""
    loads = (1.0, 0.7, 0.4, 0.9)
    stages = zip(graph.stages, loads, strict=False)
    own = tuple(replace(s, load=load, weight_share=0.4, message=0.1) for s, load in stages)
    return replace(graph, stages=own)


@pytest.mark.parametrize("graph", [ROW, uneven(ROW), uneven(DIAMOND)])
def test_machine_code_makes_the_same_list_as_plain_python(graph, monkeypatch):
    """To the last bit: ranks run in plain Python what a search has planned with machine code."""
    graph = ZeroBubble().warm_up(graph)
    lengths, lists = lengths_of(graph.stages), []
    import_module("numba")
    for is_loaded in (True, False):
        if not is_loaded:
            monkeypatch.delitem(sys.modules, "numba")
        passes = ListPasses(graph)
        improved = passes.improved(passes.scheduled(lengths), lengths)
        lists.append((improved.order.tolist(), improved.ends.tolist()))
    assert lists[0] == lists[1]


def test_what_a_stage_holds_at_most():
    """Under H1 as many micro-batches as the first stage of 1F1B, if there are so many."""
    graph = ZeroBubble().warm_up(ROW)
    passes = ListPasses(graph)
    assert passes.most_in_flight(passes.scheduled(lengths_of(graph.stages))) == [3, 3, 3]


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


def test_a_split_backward_is_passed_on_after_its_first_half() -> None:
    """Stage 1 waits for the input gradient of stage 2, not for the weight gradient after it."""
    graph = GPipe().warm_up(
        StageGraph(tuple(Stage((f"op{s}",), (s % 2,), 1) for s in range(3)), ((0, 1), (1, 2)), 1)
    )
    merged = Schedule.parse("0: 0F0 2F0 2I0 2W0 0I0 0W0\n1: 1F0 1I0 1W0")
    check(merged, graph)
    times = StageTimes([{1: 1.0}] * 3, [{1: 2.0}] * 3)
    starts = {str(span.action): span.start for span in run(graph, merged, times).spans}
    assert (starts["2I0"], starts["1I0"], starts["0I0"]) == (3.0, 4.0, 5.0)


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
        passes = 3 if s in schedule.split_stages else 2
        assert len(alone) == passes * graph.num_microbatches(s)
