"""Compiling a schedule: what both ends of a message agree on."""

import pytest

from anabranch.errors import InvalidScheduleError
from anabranch.planner.stages import Stage, StageGraph
from anabranch.schedule import SCHEDULES
from anabranch.schedule.lower import lower
from anabranch.schedule.schedule import Schedule
from anabranch.simulator.costs import StageTimes
from anabranch.simulator.program import compile_schedule

GRAPH = StageGraph((Stage(("a",), (0,), 1), Stage(("b",), (1,), 2)), ((0, 1),), 6)
TIMES = StageTimes([{1: 1.0}] * 2, [{1: 2.0}] * 2)


def test_receives_are_posted_for_whole_microbatches():
    """Stage 1 takes two messages per micro-batch; message n opens when so many have been taken."""
    rule = SCHEDULES["gpipe"]()
    warm = rule.warm_up(GRAPH)

    def opens(slots: int) -> list[int]:
        order = Schedule(rule.order(warm).actions, slots)
        table = compile_schedule(lower(order, warm, gradient_edges=()), warm, TIMES).messages
        return table.opens

    assert opens(1) == [0, 0, 2, 2, 4, 4]
    assert opens(2) == [0, 0, 0, 0, 2, 2]


def test_halves_of_a_backward_take_half_of_it_each():
    """The weight gradient is the last of its stage, and releases what was held."""
    graph = StageGraph((Stage(("a",), (0,), 1),), (), 1)
    program = compile_schedule(Schedule.parse("0: 0F0 0I0 0W0"), graph, TIMES)
    assert [(step.seconds, step.last) for step in program.steps[0]] == [(1, -1), (1, -1), (1, 0)]


def test_a_send_that_nobody_receives():
    """Found before the clock runs."""
    schedule = Schedule.parse("0: 0F0 0SF0>1@1[0:1]\n1: 1F0")
    with pytest.raises(InvalidScheduleError, match=r"device 0: nobody receives 0SF0>1@1\[0:1\]"):
        compile_schedule(schedule, GRAPH, TIMES)
