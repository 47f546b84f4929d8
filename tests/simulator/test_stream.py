"""Mini-batches without a flush: the period, its pictures, memory, and what is refused."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.errors import InvalidPlanError
from anabranch.plans.edges import MessageEdges
from anabranch.plans.stages import StageGraph
from anabranch.schedule import SCHEDULES, asynchronous
from anabranch.schedule.asynchronous import split_batches
from anabranch.simulator import stream
from anabranch.simulator.costs import ModelCosts, StageTimes, StepCosts
from anabranch.simulator.run import step_seconds
from anabranch.timeline import Timeline
from tests.simulator.helpers import chain, cluster, cost_model, draw, stage_graph
from tests.strategies import stage_graphs

TWO_BRANCHES = ((0, 2), (1, 2))


def steady(graph: StageGraph, costs: StepCosts) -> stream.Steady:
    """Of replicas that split each mini-batch."""
    return stream.steady(split_batches(graph), costs)


def record(graph: StageGraph, costs: StepCosts, batches: int) -> Timeline:
    return stream.record(split_batches(graph), costs, batches=batches)


def times(forward_s: list[float], backward_s: list[float], samples: int = 1) -> StageTimes:
    """Free links."""
    return StageTimes([{samples: f} for f in forward_s], [{samples: b} for b in backward_s])


def one_by_one(count: int, batch_size: int = 1) -> StageGraph:
    """A chain whose mini-batches are one micro-batch."""
    return asynchronous.warm_up(
        stage_graph(chain(count), [(i,) for i in range(count)], batch_size, [batch_size] * count)
    )


@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_equal_stages_take_the_time_of_one(count):
    """No bubble at all: a mini-batch every F + B, however many stages."""
    found = steady(one_by_one(count), times([1.0] * count, [2.0] * count))
    assert found.period_s == pytest.approx(3.0, rel=1e-12)
    assert found.periodic
    assert found.bubble == pytest.approx(0.0, abs=1e-12)


def test_a_picture_of_three_stages():
    """As at the head of the module, F = B = 1 s: fill, steady state, drain."""
    timeline = record(one_by_one(3), times([1.0] * 3, [1.0] * 3), batches=5)
    assert draw(timeline) == [
        "F0 F1 F2  .  . B0 F3 B1 F4 B2  . B3  . B4",
        " . F0 F1  . B0 F2 B1 F3 B2 F4 B3  . B4",
        " .  . F0 B0 F1 B1 F2 B2 F3 B3 F4 B4",
    ]


def test_the_slowest_stage_decides():
    """Of 2, 9 and 4 s per mini-batch: 9; the others wait, 12 s of 27."""
    found = steady(one_by_one(3), times([1.0, 4.0, 2.0], [1.0, 5.0, 2.0]))
    assert found.period_s == pytest.approx(9.0, rel=1e-12)
    assert found.bubble == pytest.approx(12 / 27)


def test_two_branches_side_by_side():
    """Each branch holds 2, not the 3 that it would in a row, and the period is the slower one's."""
    graph = asynchronous.warm_up(stage_graph(TWO_BRANCHES, [(0,), (1,), (2,)], 1))
    assert [stage.in_flight for stage in graph.stages] == [2, 2, 1]
    found = steady(graph, times([1.0, 2.0, 1.0], [2.0, 3.0, 2.0]))
    assert found.period_s == pytest.approx(5.0, rel=1e-12)
    timeline = stream.record(
        split_batches(graph), times([1.0, 1.0, 1.0], [1.0, 1.0, 1.0]), batches=3
    )
    assert draw(timeline) == [
        "F0 F1  . B0 F2 B1  . B2",
        "F0 F1  . B0 F2 B1  . B2",
        " . F0 B0 F1 B1 F2 B2",
    ]


def test_replicas_wait_for_the_sum_of_their_gradients():
    """One stage on two devices: 1.5 s of compute for half of 1 + 2 s, and a sum after each batch.

    8 bytes over 2 devices at 4 bytes/s and no latency: 2 * 1/2 * 8 / 4 = 2 s.
    """
    cost = cost_model((), [1.0], [2.0], cluster(2, bandwidth=4), parameter_bytes=8)
    graph = asynchronous.warm_up(stage_graph((), [(0, 1)], 2, [2]))
    found = steady(graph, ModelCosts(graph, cost))
    assert found.period_s == pytest.approx(3.0 + 2.0)
    assert found.bubble == pytest.approx(2 / 5)


def test_the_next_forward_waits_for_the_sum_and_the_neighbour_does_not():
    """Stage 0 on two devices sums for 2 s before F2, while stage 1 goes on."""
    cost = cost_model(chain(2), [2.0, 1.0], [2.0, 1.0], cluster(3, bandwidth=4), parameter_bytes=8)
    graph = asynchronous.warm_up(stage_graph(chain(2), [(0, 1), (2,)], 2, [2, 2]))
    timeline = record(graph, ModelCosts(graph, cost), batches=3)
    rows = draw(timeline)
    assert rows[0] == rows[1] == "F0 F0 F1 F1  .  . B0 B0  .  . F2 F2 B1 B1  .  . B2 B2"
    assert rows[2] == " .  . F0 F0 B0 B0 F1 F1 B1 B1  .  . F2 F2 B2 B2"
    # 2 * (1/2) * 8 bytes / 4 bytes per second after the last backward.
    assert timeline.step_s == pytest.approx(18 + 2)


def test_a_large_sum_goes_in_pieces_and_takes_as_long():
    """100 MiB at 50 MiB/s over 2 devices: 2 s, in 4 pieces, on top of 3 s of compute."""
    mib = 2**20
    cost = cost_model((), [1.0], [2.0], cluster(2, bandwidth=50 * mib), parameter_bytes=100 * mib)
    cost = replace(cost, cluster=replace(cost.cluster, memory_bytes=10**10))
    graph = asynchronous.warm_up(stage_graph((), [(0, 1)], 2, [2]))
    assert steady(graph, ModelCosts(graph, cost)).period_s == pytest.approx(3.0 + 2.0)


def test_one_sum_per_mini_batch_of_many_micro_batches():
    """Four micro-batches of 3 s per replica and 2 s of sum: 14 s, not 4 * 5."""
    cost = cost_model((), [1.0], [2.0], cluster(2, bandwidth=4), parameter_bytes=8)
    graph = asynchronous.warm_up(stage_graph((), [(0, 1)], 8, [2]))
    assert steady(graph, ModelCosts(graph, cost)).period_s == pytest.approx(14.0)


def test_micro_batches_follow_over_the_end_of_a_mini_batch():
    """A chain of 4 with 8 micro-batches: 8 * 3 s, where a flush would add 3 * 3 s."""
    graph = asynchronous.warm_up(stage_graph(chain(4), [(i,) for i in range(4)], 8))
    assert [stage.in_flight for stage in graph.stages] == [4, 3, 2, 1]
    assert stream.steady(
        split_batches(graph), times([1.0] * 4, [2.0] * 4)
    ).period_s == pytest.approx(24.0)
    assert [stream.units_held(graph, s) for s in range(4)] == [2, 2, 2, 1]


def test_memory_by_hand():
    """Two stages, parameters of 100 bytes, 10 kept per sample, values of 4; batches of 2 samples.

    ========  ==========================  ==================  =======================
    stage 0   100 * (2 versions + 1 + 2)  2 in flight * 20    4 per sample posted back
    stage 1   100 * (1 + 1 + 2)           1 in flight * 20    8 entered, 8 posted
    ========  ==========================  ==================  =======================

    and 100 bytes of a gradient before it is added.
    """
    cost = cost_model(
        chain(2), [1.0] * 2, [1.0] * 2, cluster(2), value_bytes=4, parameter_bytes=100,
        kept_bytes=10,
    )  # fmt: skip
    graph = asynchronous.warm_up(stage_graph(chain(2), [(0,), (1,)], 2, [2, 2]))
    costs = ModelCosts(graph, cost, versions=(2, 1))
    assert steady(graph, costs).device_peak_bytes == (
        500 + 2 * 20 + 8 + 100,
        400 + 20 + 8 + 8 + 100,
    )


def test_a_stage_that_no_gradient_reaches_has_the_pace_of_the_slowest():
    """Nothing comes back to stage 0, which runs ahead; what trains goes on at 3 s."""
    graph = one_by_one(2)
    free = replace(times([0.5, 1.0], [0.5, 2.0]), message_edges=MessageEdges(back=()))
    found = steady(graph, free)
    assert not found.periodic
    assert found.period_s == pytest.approx(3.0, rel=1e-9)


def test_tied_parameters_are_refused():
    """Two stages read one parameter and would update it at different times."""
    cost = cost_model(chain(3), [1.0] * 3, [1.0] * 3, cluster(3), parameter_bytes=8, tied=(0, 2))
    graph = one_by_one(3)
    with pytest.raises(InvalidPlanError, match=r"stages 0 and 2 share .*gather.*mode sync"):
        steady(graph, ModelCosts(graph, cost))


@st.composite
def streams(draw: st.DrawFn) -> tuple[StageGraph, StageTimes, int]:
    """Any graph of up to 5 stages whose mini-batches are one micro-batch, its times, and M."""
    count = draw(st.integers(1, 5))
    pairs = [(x, y) for y in range(count) for x in range(y)]
    edges = tuple(sorted(pair for pair in pairs if draw(st.booleans())))
    graph = stage_graph(edges, [(i,) for i in range(count)], 1)
    seconds = st.lists(st.integers(1, 5), min_size=count, max_size=count)
    return graph, times(draw(seconds), draw(seconds)), draw(st.integers(1, 12))


@given(streams())
def test_between_the_slowest_stage_and_a_flush(case):
    """No mini-batch comes sooner than the slowest stage allows, nor later than in a step of M."""
    graph, costs, microbatches = case
    flushed = SCHEDULES["1f1b"]().warm_up(replace(graph, batch_size=microbatches))
    step_s = step_seconds(flushed, SCHEDULES["1f1b"]().order(flushed), costs)
    full = asynchronous.warm_up(graph)
    found = steady(full, costs)
    assert found.period_s >= stream.least_period_s(full, costs) * (1 - 1e-9)
    assert found.period_s <= step_s / microbatches * (1 + 1e-9)


@given(streams(), st.booleans())
def test_a_long_stream_goes_at_the_period(case, replicated):
    """60 mini-batches more take 60 periods more, with replicas that sum their gradients or not."""
    graph, seconds, _ = case
    count = len(graph)
    machines = cluster(2 * count, bandwidth=4, latency_s=0.25)
    cost = cost_model(
        graph.edges,
        [each[1] for each in seconds.forward_s],
        [each[1] for each in seconds.backward_s],
        machines,
        value_bytes=2,
        parameter_bytes=8,
    )
    devices = [(2 * s, 2 * s + 1) if replicated else (2 * s,) for s in range(count)]
    full = asynchronous.warm_up(stage_graph(graph.edges, devices, 2, [2] * count))
    costs = ModelCosts(full, cost)
    found = steady(full, costs)
    if found.periodic:
        # As long as it took to find the period; a period of several mini-batches may be cut.
        settled = found.simulated // len(full.devices)
        short, long = (record(full, costs, batches=n).step_s for n in (settled, settled + 60))
        assert (long - short) / 60 == pytest.approx(found.period_s, rel=0.03)


def in_turns(graph: StageGraph) -> asynchronous.AsynchronousOrder:
    """Replicas take mini-batches in turn."""
    return asynchronous.round_robin(graph)


def test_replicas_take_minibatches_in_turn():
    """Stage 0 takes 24 s for a mini-batch, which two replicas share; its gradients are summed once
    in two mini-batches, 1 s more for each, and not once in one, 2 s.
    """
    graph = asynchronous.warm_up(stage_graph(chain(2), [(0, 1), (2,)], 4, [4, 4]))
    machines = cluster(3, bandwidth=50.0)
    cost = cost_model(chain(2), [2.0, 1.0], [4.0, 2.0], machines, parameter_bytes=100)
    assert steady(graph, ModelCosts(graph, cost)).period_s == pytest.approx(14.0)
    turns = in_turns(graph)
    costs = ModelCosts(turns.graph, cost)
    found = stream.steady(turns, costs)
    assert found.period_s == pytest.approx(13.0)
    assert found.bubble == pytest.approx(1 - (2 * 12 + 12) / 39)
    assert stream.least_period_s(turns.graph, costs) == pytest.approx(2 * 13.0)


def test_a_picture_of_turns():
    """Two replicas, and a stage behind them that takes half as long; F and B are numbered by
    rounds: mini-batches 0 and 1 are round 0 of stage 0.
    """
    graph = asynchronous.warm_up(stage_graph(chain(2), [(0, 1), (2,)], 1, [1, 1]))
    turns = in_turns(graph)
    timeline = stream.record(turns, times([2.0, 1.0], [2.0, 1.0]), batches=2)
    assert draw(timeline) == [
        "F0 F0 F1 F1 B0 B0  .  . B1 B1",
        "F0 F0 F1 F1  .  . B0 B0  .  . B1 B1",
        " .  . F0 B0 F1 B1 F2 B2 F3 B3",
    ]


@given(stage_graphs(max_stages=4, max_replicas=3), st.integers(1, 3))
def test_turns_of_any_stage_graph_are_simulated(graph, samples):
    """Nobody waits for ever, and no period is below its bound."""
    count = len(graph)
    sized = stage_graph(
        graph.edges, [stage.devices for stage in graph.stages], samples, [samples] * count
    )
    machines = cluster(len(graph.devices), bandwidth=4, latency_s=0.25)
    cost = cost_model(
        graph.edges, [1.0] * count, [2.0] * count, machines, value_bytes=2, parameter_bytes=8
    )
    turns = in_turns(asynchronous.warm_up(sized))
    costs = ModelCosts(turns.graph, cost)
    found = stream.steady(turns, costs)
    least_s = stream.least_period_s(turns.graph, costs) / turns.minibatches
    assert found.period_s >= least_s * (1 - 1e-9)
