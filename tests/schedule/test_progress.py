"""Counts of computes say what the messages say: whether every device comes to its end."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.errors import DeadlockError, InvalidScheduleError
from anabranch.plans.edges import MessageEdges
from anabranch.plans.plan import Plan
from anabranch.plans.stages import Stage, StageGraph
from anabranch.schedule import SCHEDULES, compute_order, require_schedule, schedule_of
from anabranch.schedule.check import check_order, checked
from anabranch.schedule.progress import finishes
from anabranch.schedule.schedule import Action, Kind, Schedule
from anabranch.solve import check_plan
from tests.strategies import stage_graphs


@given(stage_graphs(max_stages=6, max_replicas=3), st.sampled_from(sorted(SCHEDULES)), st.data())
def test_as_with_messages(graph: StageGraph, name: str, data: st.DataObject):
    """Any graph and sizes, with counts that may be too small; the oracle runs the messages."""
    graph = SCHEDULES[name]().warm_up(graph)
    stages = tuple(
        replace(stage, in_flight=max(1, stage.in_flight + data.draw(st.integers(-2, 2))))
        for stage in graph.stages
    )
    graph = replace(graph, stages=stages)
    edges = MessageEdges(back=[edge for edge in graph.edges if data.draw(st.booleans())])
    try:
        order = compute_order(graph, name)
        check_order(order, graph, edges)
    except InvalidScheduleError:
        return
    try:
        checked(order, graph, edges)
        runs = True
    except DeadlockError:
        runs = False
    assert finishes(order, graph, edges) == runs


def test_replicas_wait_for_each_other_at_an_update():
    """Devices 0 and 1 sum two stages' gradients in the other order, as no rule has them do."""
    graph = StageGraph((Stage(("a",), (0, 1), 2), Stage(("b",), (0, 1), 2)), ((0, 1),), 2)
    head = [Action(0, Kind.FORWARD, 0), Action(1, Kind.FORWARD, 0)]
    head += [Action(1, Kind.BACKWARD, 0), Action(0, Kind.BACKWARD, 0)]
    updates = [Action(1, Kind.UPDATE, 0), Action(0, Kind.UPDATE, 0)]
    for order, runs in ((updates, True), (updates[::-1], False)):
        schedule = Schedule({0: (*head, *updates), 1: (*head, *order)})
        assert finishes(schedule, graph) == runs


def test_a_deadlock_is_told_as_ever():
    """The warm-up rises along the edge: both ways end with the sentence that names it."""
    graph = StageGraph((Stage(("a",), (0,), 1, 2, 2), Stage(("b",), (1,), 1, 1, 2)), ((0, 1),), 4)
    for way in (schedule_of, require_schedule):
        with pytest.raises(DeadlockError, match="The warm-up is short along stage edge 0 -> 1"):
            way(graph, "1f1b")


def calls_of_check(stages: int) -> int:
    """Count the calls of Python functions that the check of a plan of 20 edges a stage takes."""
    edges = tuple((x, y) for x in range(stages) for y in range(x + 1, min(x + 21, stages)))
    graph = StageGraph(tuple(Stage((f"op{s}",), (s,), 1) for s in range(stages)), edges, 2)
    count = 0

    def counted(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    warm = SCHEDULES["1f1b"]().warm_up(graph)
    plan = Plan(warm, "1f1b", "", "m", "c", "", 0.0, 0.0, None)
    sys.setprofile(counted)
    try:
        assert check_plan(plan) == []
    finally:
        sys.setprofile(None)
    return count


def test_the_check_is_linear_in_the_edges():
    """3,000 stages with 60,000 edges are checked in a second, a tenth of them in a tenth."""
    small, large = calls_of_check(100), calls_of_check(400)
    assert large < 4.6 * small
    assert large < 40 * 20 * 400
