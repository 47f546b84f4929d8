"""Compiling a schedule: what both ends of a message agree on."""

from dataclasses import replace

import pytest

from anabranch.cost import CostModel
from anabranch.errors import InvalidScheduleError
from anabranch.plans.edges import MessageEdges
from anabranch.plans.stages import Stage, StageGraph
from anabranch.schedule import SCHEDULES
from anabranch.schedule.lower import lower
from anabranch.schedule.schedule import Schedule
from anabranch.simulator.costs import StageTimes
from anabranch.simulator.program import compile_schedule
from anabranch.simulator.run import run, step_seconds
from tests.simulator.helpers import cluster, cost_model, stage_graph

GRAPH = StageGraph((Stage(("a",), (0,), 1), Stage(("b",), (1,), 2)), ((0, 1),), 6)
EDGES = ((0, 1), (0, 2), (1, 2))
TIMES = StageTimes([{1: 1.0}] * 2, [{1: 2.0}] * 2)


def test_receives_are_posted_for_whole_microbatches():
    """Stage 1 takes two messages per micro-batch: the second of them lets in both of the next."""
    rule = SCHEDULES["gpipe"]()
    warm = rule.warm_up(GRAPH)

    def posted(*, lowered: bool) -> list[int]:
        order = rule.order(warm)
        forward = replace(TIMES, message_edges=MessageEdges(back=()))
        given = lower(order, warm, forward.message_edges) if lowered else order
        program = compile_schedule(given, warm, forward)
        openers = program.messages.table["opener"]
        assert program.messages.table["ready"].tolist() == (openers < 0).tolist()
        return openers.tolist()

    assert posted(lowered=False) == posted(lowered=True) == [-1, -1, 1, 1, 3, 3]


def test_code_is_receives_sends_and_compute():
    """Four messages: 0 and 1 forward, 2 and 3 back; then units in the order in which they occur."""
    graph = StageGraph((Stage(("a",), (0,), 1), Stage(("b",), (1,), 1)), ((0, 1),), 2)
    rule = SCHEDULES["gpipe"]()
    warm = rule.warm_up(graph)
    program = compile_schedule(rule.order(warm), warm, TIMES)
    words = [[_word(x, 4) for x in code] for code in program.code]
    assert words == [
        ["unit 0", "send 0", "unit 0", "send 1", "take 2", "unit 1", "take 3", "unit 2"],
        ["take 0", "unit 3", "take 1", "unit 3", "unit 4", "send 2", "unit 5", "send 3"],
    ]


def _word(x: int, messages: int) -> str:
    if x >= 0:
        return f"take {x}"
    return f"send {~x}" if ~x < messages else f"unit {~x - messages}"


def test_halves_of_a_backward_take_half_of_it_each():
    """Profiles do not tell them apart; on matrix products they cost the same."""
    graph = StageGraph((Stage(("a",), (0,), 1),), (), 1)
    schedule = Schedule.parse("0: 0F0 0I0 0W0")
    program = compile_schedule(schedule, graph, TIMES)
    (code,) = program.code
    assert [program.units[~x].seconds for x in code] == [1, 1, 1]


def test_nothing_travels_between_stages_that_share_a_device():
    """What one of them sends to the other on that device is no message."""
    graph = StageGraph((Stage(("a",), (0,), 1), Stage(("b",), (0,), 1)), ((0, 1),), 1)
    schedule = Schedule.parse("0: 0F0 1F0 1B0 0B0")
    assert step_seconds(graph, schedule, TIMES) == 6


def two_stages(samples: int) -> StageGraph:
    """Two in a row, a sample per micro-batch."""
    return StageGraph((Stage(("a",), (0,), 1), Stage(("b",), (1,), 1)), ((0, 1),), samples)


@pytest.mark.parametrize(
    ("order", "problem"),
    [
        ("0: 0F0 0F1 0B1 0B0\n1: 1F0 1F1 1B1 1B0", "of 4: micro-batch 1 where micro-batch 0"),
        ("0: 0F0 0F1 0B0 0B1\n1: 1F0 1B0", "device 1 runs 1 of the 2 micro-batches of stage 1"),
        ("0: 0F0 0F1 0B0 0B1", r"but the stages are on devices \[0, 1\]"),
        ("0: 0F0 0F1 0B0 0B1\n1: 1F0 1F1 1B0 1B1 1B1", "micro-batch 1 where micro-batch 2 is next"),
    ],
)
def test_orders_by_hand_are_whole_and_in_turn(order: str, problem: str) -> None:
    """One that lacks a micro-batch, or takes them out of order, is refused, not taken for a
    deadlock.
    """
    times = StageTimes([{1: 1.0}] * 2, [{1: 1.0}] * 2)
    with pytest.raises(InvalidScheduleError, match=problem):
        run(two_stages(2), Schedule.parse(order), times)


def test_what_prices_keep_of_messages_holds_for_other_graphs() -> None:
    """Stage graphs of one cost model share what has been made of their messages: each takes as long
    as with a cost model of its own, whatever came before it.
    """

    def costs() -> CostModel:
        machines = cluster(2, 2, bandwidth=8, latency_s=0.25)
        return cost_model(EDGES, [1, 1, 1], [2, 2, 2], machines, value_bytes=4)

    shared, rule, seconds = costs(), SCHEDULES["1f1b"](), set()
    for devices in ("01 2 3", "0 12 3", "3 12 0", "0 1 2"):
        for sizes in ([2, 4, 4], [4, 4, 2], [4, 8, 8]):
            where = [tuple(map(int, some)) for some in devices.split()]
            graph = rule.warm_up(stage_graph(EDGES, where, 16, sizes))
            order = rule.order(graph)
            found = {step_seconds(graph, order, cost) for cost in (shared, shared, costs())}
            assert len(found) == 1
            seconds |= found
    assert len(seconds) > 6
