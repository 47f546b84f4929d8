"""The table of rules, and the way from stages to a schedule that is checked."""

from dataclasses import replace

import pytest

from anabranch.errors import AnabranchError, InvalidScheduleError
from anabranch.plans.edges import MessageEdges
from anabranch.schedule import SCHEDULES, compute_order, rule_named, schedule_of
from tests.simulator.helpers import stage_graph

TWO = rule_named("1f1b").warm_up(stage_graph(((0, 1),), [(0,), (1,)], 2))


def test_a_schedule_has_its_messages():
    """Those of the edges that have any, and the slots that were asked for."""
    schedule = schedule_of(TWO, "1f1b", MessageEdges(back=()), slots=3)
    assert str(schedule).splitlines()[1] == "1: 1RF0<0@0[0:1] 1F0 1B0 1RF1<0@0[1:2] 1F1 1B1"
    assert schedule.slots == 3


def test_the_order_alone():
    """The same computes without messages."""
    assert str(compute_order(TWO, "1f1b")) == "0: 0F0 0F1 0B0 0B1\n1: 1F0 1B0 1F1 1B1"


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
