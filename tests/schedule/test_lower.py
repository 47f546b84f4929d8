"""Messages by sample intervals."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.plans.edges import EVERY_EDGE, MessageEdges
from anabranch.plans.stages import Stage, StageGraph
from anabranch.schedule import SCHEDULES
from anabranch.schedule.lower import directions, lower, messages
from anabranch.schedule.schedule import Schedule
from tests.strategies import stage_graphs


def pair(source: Stage, target: Stage, batch_size: int) -> StageGraph:
    """0 -> 1."""
    return StageGraph((source, target), ((0, 1),), batch_size)


def lowered(
    graph: StageGraph, schedule: str = "gpipe", edges: MessageEdges = EVERY_EDGE
) -> Schedule:
    """The lowered schedule of a rule."""
    rule = SCHEDULES[schedule]()
    graph = rule.warm_up(graph)
    return lower(rule.order(graph), graph, edges)


def test_equal_stages_send_one_message_per_microbatch_and_direction():
    """A receive right before the compute that needs it, a send right after its compute."""
    graph = pair(Stage(("a",), (0,), 2), Stage(("b",), (1,), 2), 4)
    assert str(lowered(graph)) == (
        "0: 0F0 0SF0>1@1[0:2] 0F1 0SF1>1@1[2:4] 0RB0<1@1[0:2] 0B0 0RB1<1@1[2:4] 0B1\n"
        "1: 1RF0<0@0[0:2] 1F0 1RF1<0@0[2:4] 1F1 1B0 1SB0>0@0[0:2] 1B1 1SB1>0@0[2:4]"
    )


def test_unequal_replicas_and_sizes_exchange_intersections():
    """Micro-batches of 4 on one device feed one of 8 (batch 6, so it is short) on two.

    stage 0, device 0   [ 0 1 2 3 ][ 4 5 ]
    stage 1, device 1   [ 0 1 2 ]
    stage 1, device 2          [ 3 4 5 ]
    """
    graph = pair(Stage(("a",), (0,), 4), Stage(("b",), (1, 2), 8), 6)
    found = [(m.sent_microbatch, m.receiver, m.start, m.stop) for m in messages(graph, 0, 1)]
    assert found == [(0, 1, 0, 3), (0, 2, 3, 4), (1, 2, 4, 6)]
    assert str(lowered(graph)).splitlines()[2] == (
        "2: 1RF0<0@0[3:4] 1RF0<0@0[4:6] 1F0 1B0 1SB0>0@0[3:4] 1SB0>0@0[4:6]"
    )


def test_an_empty_slice_has_compute_but_no_messages():
    """The last micro-batch has one sample for two replicas; the first of them gets none."""
    graph = pair(Stage(("a",), (0,), 2), Stage(("b",), (1, 2), 2), 3)
    lines = str(lowered(graph)).splitlines()
    assert lines[1] == "1: 1RF0<0@0[0:1] 1F0 1F1 1B0 1SB0>0@0[0:1] 1B1"
    assert lines[2].startswith("2: 1RF0<0@0[1:2] 1F0 1RF1<0@0[2:3] 1F1")


def test_only_gradient_edges_send_back():
    """Token embeddings may be frozen, masks have no gradient at all; the caller also decides which
    edges have any data.
    """
    graph = pair(Stage(("a",), (0,), 2), Stage(("b",), (1,), 2), 2)
    text = str(lowered(graph, edges=MessageEdges(back=())))
    assert text == "0: 0F0 0SF0>1@1[0:2] 0B0\n1: 1RF0<0@0[0:2] 1F0 1B0"
    assert str(lowered(graph, edges=MessageEdges(forward=()))) == "0: 0F0 0B0\n1: 1F0 1B0"


def test_stages_on_one_device_need_no_message():
    """What is at hand is not sent."""
    graph = pair(Stage(("a",), (0,), 1), Stage(("b",), (0,), 1), 1)
    schedule = Schedule.parse("0: 0F0 1F0 1B0 0B0")
    assert str(lower(schedule, graph)) == "0: 0F0 1F0 1B0 0B0"


def test_halves_of_a_backward():
    """The input gradient receives and sends; the weight gradient keeps to itself."""
    graph = pair(Stage(("a",), (0,), 1), Stage(("b",), (1,), 1), 1)
    schedule = Schedule.parse("0: 0F0 0I0 0W0\n1: 1F0 1I0 1W0")
    assert str(lower(schedule, graph)) == (
        "0: 0F0 0SF0>1@1[0:1] 0RB0<1@1[0:1] 0I0 0W0\n1: 1RF0<0@0[0:1] 1F0 1I0 1SB0>0@0[0:1] 1W0"
    )


def test_lowering_twice_is_refused():
    """It would double every message."""
    graph = pair(Stage(("a",), (0,), 1), Stage(("b",), (1,), 1), 1)
    with pytest.raises(ValueError, match="already"):
        lower(lowered(graph), graph)


@given(stage_graphs(max_stages=5, max_replicas=3), st.sampled_from(sorted(SCHEDULES)))
def test_lowering_keeps_the_compute_order(graph, name):
    """Messages are put between, nothing is moved."""
    rule = SCHEDULES[name]()
    warm = rule.warm_up(graph)
    before = rule.order(warm)
    after = lower(before, warm)
    for device, actions in after.actions.items():
        assert tuple(a for a in actions if a.kind.is_compute) == before.actions[device]


@given(stage_graphs(max_stages=2, max_replicas=4))
def test_messages_of_an_edge_tile_the_batch(graph):
    """Every sample crosses every edge exactly once."""
    for x, y in graph.edges:
        crossed = [n for m in messages(graph, x, y) for n in range(m.start, m.stop)]
        assert crossed == list(range(graph.batch_size))


@given(stage_graphs(max_stages=3))
def test_each_device_gets_each_of_its_samples_once(graph):
    """Forward every device of the target, back every device of the source; by brute force."""
    for source, target, forward in directions(graph):
        stage = graph.stages[target]
        got = sorted(
            (m.receiver, n)
            for m in messages(graph, source, target, forward=forward)
            for n in range(m.start, m.stop)
        )
        assert got == sorted(
            (device, n)
            for at, device in enumerate(stage.devices)
            for i in range(graph.num_microbatches(target))
            for n in range(*graph.slice(target, i, at))
        )


@given(stage_graphs(max_stages=3))
def test_who_sends_has_the_samples(graph):
    """Both ends hold every sample of a message, in the micro-batches that it names."""
    for source, target, forward in directions(graph):
        for i, a, j, b, start, stop in messages(graph, source, target, forward=forward):
            for s, microbatch, device in ((source, i, a), (target, j, b)):
                stage = graph.stages[s]
                replica = stage.devices.index(device)
                first, last = graph.slice(s, microbatch, replica)
                assert first <= start < stop <= last
