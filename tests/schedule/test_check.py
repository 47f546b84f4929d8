"""The checker accepts what can run and says what is wrong with the rest."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.errors import DeadlockError, InvalidScheduleError
from anabranch.plans.edges import MessageEdges
from anabranch.plans.in_flight import with_in_flight
from anabranch.plans.stages import Stage, StageGraph
from anabranch.schedule import SCHEDULES
from anabranch.schedule.check import check, checked, describe_deadlock
from anabranch.schedule.kfkb import KFKB
from anabranch.schedule.lower import lower
from anabranch.schedule.schedule import Action, Kind, Schedule
from tests.strategies import stage_graphs

TWO = StageGraph(
    (Stage(("a",), (0,), 1, in_flight=2), Stage(("b",), (1,), 1, in_flight=2)), ((0, 1),), 2
)
"""Two stages, two micro-batches of one sample."""

GOOD = (
    "0: 0F0 0SF0>1@1[0:1] 0F1 0SF1>1@1[1:2] 0RB0<1@1[0:1] 0B0 0RB1<1@1[1:2] 0B1\n"
    "1: 1RF0<0@0[0:1] 1F0 1B0 1SB0>0@0[0:1] 1RF1<0@0[1:2] 1F1 1B1 1SB1>0@0[1:2]"
)


@given(stage_graphs(max_stages=6, max_replicas=3), st.sampled_from(sorted(SCHEDULES)), st.data())
def test_every_rule_passes(graph, name, data):
    """Any graph, any replicas, any micro-batch sizes, any k, also where edges send nothing back."""
    rule = SCHEDULES[name]()
    warm = rule.warm_up(graph)
    back = [edge for edge in warm.edges if data.draw(st.booleans())]
    check(lower(rule.order(warm), warm), warm)
    edges = MessageEdges(back=back)
    check(lower(rule.order(warm), warm, edges), warm, edges)


@given(stage_graphs(max_stages=6, max_replicas=1), st.data())
def test_counts_that_never_rise_never_deadlock(graph, data):
    """With one size and k = 1, any warm-up that does not rise along an edge is good."""
    counts: list[int] = []
    for s in reversed(range(len(graph))):
        least = max((counts[len(graph) - 1 - y] for y in graph.successors[s]), default=1)
        counts.append(data.draw(st.integers(least, least + 3)))
    size = graph.stages[0].microbatch_size
    stages = tuple(
        replace(stage, in_flight=count, microbatch_size=size, k=1)
        for stage, count in zip(graph.stages, reversed(counts), strict=True)
    )
    graph = replace(graph, stages=stages)
    check(lower(SCHEDULES["1f1b"]().order(graph), graph), graph)


def test_a_schedule_without_messages_is_lowered_first():
    """What counts is whether it can run."""
    check(Schedule.parse("0: 0F0 0F1 0B0 0B1\n1: 1F0 1F1 1B0 1B1"), TWO)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (("0F0 0SF0>1@1[0:1] 0F1", "0F1 0SF0>1@1[0:1] 0F0"), "micro-batch 1 where micro-batch 0"),
        ((" 0RB1<1@1[1:2] 0B1", ""), "runs 1 of the 2 micro-batches of stage 0 through backward"),
        (("1F0 1B0", "1B0 1F0"), "it comes before forward 0"),
        (("0F0 0SF0>1@1[0:1]", "0SF0>1@1[0:1] 0F0"), "ask for 0F0 here: >>0SF0"),
        (("1RF1<0@0[1:2] 1F1", "1F1 1RF1<0@0[1:2]"), r"ask for 1RF1<0@0\[1:2\] here: .* >>1F1<<"),
        ((" 0SF1>1@1[1:2]", ""), r"device 0, .* ask for 0SF1>1@1\[1:2\] here"),
        (("1RF1<0@0[1:2] ", ""), r"device 1, .* ask for 1RF1<0@0\[1:2\] here"),
        (("1RF0<0@0[0:1] 1F0", "1RF0<0@0[1:2] 1F0"), r"ask for 1RF0<0@0\[0:1\] here: >>1RF0"),
        (("0F1 ", "1F1 "), "stage 1 is not on this device"),
        (("1:", "2:"), r"devices \[0, 2\], but the stages are on devices \[0, 1\]"),
        (("0B1", "0B1 0F2"), "stage 0 has only 2 micro-batches"),
        (("0B1", "0I1"), "both whole and in two halves"),
    ],
)
def test_what_is_wrong_is_said(spoil, message):
    """One defect each; the message shows the place."""
    bad = Schedule.parse(GOOD.replace(*spoil))
    with pytest.raises(InvalidScheduleError, match=message):
        check(bad, TWO)


def test_too_many_in_flight():
    """The count is the memory that the plan was judged by; with two the schedule is good."""
    check(Schedule.parse(GOOD), TWO)
    tight = replace(TWO, stages=(replace(TWO.stages[0], in_flight=1), TWO.stages[1]))
    with pytest.raises(InvalidScheduleError, match=r"2 micro-batches of stage 0 .* limit is 1"):
        check(Schedule.parse(GOOD), tight)


def test_swapped_messages_of_one_channel():
    """Messages of one channel arrive in the order they are sent, whoever asks for them."""
    bad = Schedule.parse(
        "0: 0F0 0F1 0SF1>1@1[1:2] 0SF0>1@1[0:1] 0RB0<1@1[0:1] 0B0 0RB1<1@1[1:2] 0B1\n"
        + GOOD.splitlines()[1]
    )
    with pytest.raises(InvalidScheduleError, match=r"ask for 0SF0>1@1\[0:1\] here"):
        check(bad, TWO)


def test_a_rising_warm_up_deadlocks():
    """Stage 0 holds one micro-batch, stage 1 wants two before its first backward."""
    schedule = Schedule.parse("0: 0F0 0B0 0F1 0B1\n1: 1F0 1F1 1B0 1B1")
    with pytest.raises(DeadlockError) as caught:
        check(lower(schedule, TWO), TWO)
    assert str(caught.value).splitlines() == [
        "the schedule deadlocks; every unfinished device waits for another:",
        "  device 0, step 3 of 8, waits for the gradient of samples 0 to 0 from stage 1 on "
        "device 1: 0F0 0SF0>1@1[0:1] >>0RB0<1@1[0:1]<< 0B0 0F1 0SF1>1@1[1:2] 0RB1<1@1[1:2] ...",
        "  device 1, step 3 of 8, waits for samples 1 to 1 from stage 0 on device 0: "
        "1RF0<0@0[0:1] 1F0 >>1RF1<0@0[1:2]<< 1F1 1B0 1SB0>0@0[0:1] 1B1 ...",
        "The warm-up is short along stage edge 0 -> 1: 1 samples forward before the first backward "
        "of stage 0, 2 of stage 1, which turn over 1 and 1 at a time; give stage 0 at least 2.",
    ]


def test_a_warm_up_that_is_short_for_its_groups_deadlocks():
    """Both hold 8 samples. Stage 0 goes on behind the gradients of 2, stage 1 has given one."""

    def held(before: int) -> StageGraph:
        first = Stage(("a",), (0,), 2, in_flight=before)
        return StageGraph((first, Stage(("b",), (1,), 1, in_flight=8)), ((0, 1),), 16)

    check(KFKB().order(held(5)), held(5))
    with pytest.raises(DeadlockError, match=r"of stage 1, which turn over 2 and 1 .* at least 9"):
        check(KFKB().order(held(4)), held(4))


def test_without_gradients_a_rising_warm_up_is_fine():
    """A frozen stage waits for nobody, so the same order runs."""
    schedule = Schedule.parse("0: 0F0 0B0 0F1 0B1\n1: 1F0 1F1 1B0 1B1")
    forward = MessageEdges(back=())
    check(lower(schedule, TWO, forward), TWO, forward)


def test_a_skip_edge_that_waits_in_a_circle():
    """0 -> 1 -> 2 and 0 -> 2: stage 1 asks for micro-batch 1 before it passes on micro-batch 0."""
    stages = tuple(Stage((f"op{i}",), (i,), 1, in_flight=2) for i in range(3))
    graph = StageGraph(stages, ((0, 1), (0, 2), (1, 2)), 2)
    schedule = Schedule.parse("0: 0F0 0B0 0F1 0B1\n1: 1F0 1F1 1B0 1B1\n2: 2F0 2B0 2F1 2B1")
    with pytest.raises(DeadlockError, match=r"(?s)device 0, .*device 1, "):
        check(lower(schedule, graph), graph)


TOGETHER = StageGraph(
    (Stage(("a",), (0,), 1, in_flight=2), Stage(("b",), (0,), 1, in_flight=2)), ((0, 1),), 2
)
"""Two stages on one device, the second reads what the first makes."""


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ("1F0 0F0 0B0 1B0 0F1 1F1 1B1 0B1", "step 1 of 8: it comes before forward 0 of stage 0"),
        ("0F0 1F0 0B0 1B0 0F1 1F1 1B1 0B1", "step 3 of 8: it comes before backward 0 of stage 1"),
        ("0F0 0F1 1F0 1F1 1B0 0B0 0B1 1B1", "step 7 of 8: it comes before backward 1 of stage 1"),
        ("0F0 1F0 0I0 0W0 1B0 0F1 1F1 1B1 0I1 0W1", "step 3 of 10: it comes before backward 0"),
    ],
)
def test_stages_of_one_device_take_turns_as_their_edge_says(order, message):
    """There is no message to wait for, so a list that uses a value before it is made would compute
    with nothing.
    """
    check(Schedule.parse("0: 0F0 1F0 1B0 0B0 0F1 1F1 1B1 0B1"), TOGETHER)
    with pytest.raises(InvalidScheduleError, match=message):
        check(Schedule.parse(f"0: {order}"), TOGETHER)


def test_stages_of_one_device_without_gradients_between_them_are_free():
    """Backwards of stages that nothing goes back between may come in any order."""
    order = Schedule.parse("0: 0F0 1F0 0B0 1B0 0F1 1F1 0B1 1B1")
    check(order, TOGETHER, MessageEdges(back=()))
    with pytest.raises(InvalidScheduleError, match="before backward 0 of stage 1"):
        check(order, TOGETHER)


def test_a_device_that_waits_for_gradients_of_others_is_named():
    """Without a flush a device sums gradients between its computes; nothing else stops it there."""
    graph = StageGraph((Stage(("a",), (0, 1), 1, in_flight=2),), (), 2)
    order = SCHEDULES["1f1b"]().order(graph)
    said = describe_deadlock(order, graph, {0: 2, 1: len(order.actions[1])}).splitlines()
    assert len(said) == 2
    assert (
        "device 0, step 3 of 4, waits for the other devices that sum gradients with it" in said[1]
    )


def test_replicas_wait_for_each_other_at_an_update():
    """Devices 0 and 1 sum two stages' gradients in the other order, as no rule has them do."""
    graph = StageGraph((Stage(("a",), (0, 1), 2), Stage(("b",), (0, 1), 2)), ((0, 1),), 2)
    graph = with_in_flight(graph, [1, 1])
    head = [Action(0, Kind.FORWARD, 0), Action(1, Kind.FORWARD, 0)]
    head += [Action(1, Kind.BACKWARD, 0), Action(0, Kind.BACKWARD, 0)]
    updates = [Action(1, Kind.UPDATE, 0), Action(0, Kind.UPDATE, 0)]
    checked(Schedule({0: (*head, *updates), 1: (*head, *updates)}), graph)
    with pytest.raises(DeadlockError, match="sum gradients"):
        checked(Schedule({0: (*head, *updates), 1: (*head, *updates[::-1])}), graph)
