"""The table of rules, and the way from stages to a schedule that is checked."""

from dataclasses import replace

import pytest

from anabranch.errors import AnabranchError, InvalidScheduleError
from anabranch.plans.edges import MessageEdges
from anabranch.plans.plan import Plan
from anabranch.schedule import SCHEDULES, compute_order, glossary, rule_named, schedule_of
from anabranch.schedule.schedule import Schedule
from tests.simulator.helpers import stage_graph

TWO = rule_named("1f1b").warm_up(stage_graph(((0, 1),), [(0,), (1,)], 2))


def test_a_schedule_has_its_messages():
    """Those of the edges that have any."""
    schedule = schedule_of(TWO, "1f1b", MessageEdges(back=()))
    assert str(schedule).splitlines()[1] == "1: 1RF0<0@0[0:1] 1F0 1B0 1RF1<0@0[1:2] 1F1 1B1"


def test_the_order_alone():
    """The same computes without messages."""
    assert str(compute_order(TWO, "1f1b")) == "0: 0F0 0F1 0B0 0B1\n1: 1F0 1B0 1F1 1B1"


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_schedule_of_a_plan_is_explained(name: str):
    """Below plans of several stages: the order of passes."""
    plan = Plan(TWO, name, "p", "m", "c", "", 0.0, 0.0, None)
    said = glossary(plan).rpartition(f"{name}: ")[2]
    words = {"gpipe": "all forwards", "1f1b": "in turn", "deep": "longer", "split": "gradients"}
    words |= {"zb": "gradients of inputs", "h2": "longer"}
    assert all(text in said for part, text in words.items() if part in name)


def test_what_a_list_says_of_itself():
    """Where its passes are, where updates begin, and which computes are alike: the last micro-batch
    may be a short one, and a last backward has sums to begin.
    """
    schedule = Schedule.parse("0: 0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3")
    order = schedule.orders[0]
    assert order == schedule.actions[0]
    passes = {key: at.tolist() for key, at in order.passes.items()}
    assert passes == {(0, True): [0, 1, 2, 3], (0, False): [4, 5, 6, 7]}
    assert order.last_backwards() == {7: 0}
    assert order.last_backwards((2,)) == {5: 0, 7: 0}
    alike = [(str(a), last, at.tolist()) for a, last, at in order.computes()]
    forwards = [("0F0", False, [0, 1, 2]), ("0F3", False, [3])]
    assert alike == [*forwards, ("0B0", False, [4, 5, 6]), ("0B3", True, [7])]
    alike = [(str(a), last, at.tolist()) for a, last, at in order.computes((2,))]
    backwards = [("0B0", False, [4, 6]), ("0B1", True, [5]), ("0B3", True, [7])]
    assert alike == [*forwards, *backwards]


def test_what_cannot_be_executed_is_refused():
    """Whoever has a schedule has one that was checked: here an order within the counts is not."""
    few = replace(TWO, stages=tuple(replace(stage, in_flight=1) for stage in TWO.stages))
    with pytest.raises(InvalidScheduleError, match="2 micro-batches of stage 0 are in flight"):
        schedule_of(few, "gpipe")
    with pytest.raises(ValueError, match="unknown schedule 'zigzag'") as caught:
        schedule_of(TWO, "zigzag")
    assert isinstance(caught.value, AnabranchError)  # a plan file may name it


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_more_room_changes_nothing(name):
    """A rule that has all the memory it wants does as it would without being told of memory."""
    rule = rule_named(name)
    assert rule.warm_up(TWO, lambda _: 100) == rule.warm_up(TWO)
