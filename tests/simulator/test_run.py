"""Simulated steps against drawings, closed forms and the cost model's memory."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.errors import DeadlockError, InvalidPlanError, InvalidScheduleError
from anabranch.plans.check import stage_bytes
from anabranch.plans.stages import Stage, StageGraph
from anabranch.schedule import SCHEDULES, SPLIT_BACKWARDS
from anabranch.schedule.check import check
from anabranch.schedule.lower import lower
from anabranch.schedule.schedule import Kind, Schedule
from anabranch.simulator.costs import ModelCosts, StageTimes
from anabranch.simulator.objective import least_step_s
from anabranch.simulator.run import run, step_seconds
from tests.simulator.helpers import chain, cluster, cost_model, draw, simulate, stage_graph
from tests.strategies import stage_graphs


def free_chain(length: int, num_microbatches: int, schedule: str, f: float = 1, b: float = 1):
    """A chain of equal stages with free links."""
    cost = cost_model(chain(length), [f] * length, [b] * length, cluster(length))
    graph = stage_graph(chain(length), [(i,) for i in range(length)], num_microbatches)
    return simulate(graph, cost, schedule)


def test_chain_of_four_under_1f1b():
    """The staircase of 1F1B with F = B = 1 second."""
    assert draw(free_chain(4, 6, "1f1b")) == [
        "F0 F1 F2 F3  .  .  . B0 F4 B1 F5 B2  . B3  . B4  . B5",
        " . F0 F1 F2  .  . B0 F3 B1 F4 B2 F5 B3  . B4  . B5",
        " .  . F0 F1  . B0 F2 B1 F3 B2 F4 B3 F5 B4  . B5",
        " .  .  . F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5",
    ]


def test_chain_of_three_under_gpipe():
    """All forwards, then all backwards."""
    assert draw(free_chain(3, 4, "gpipe")) == [
        "F0 F1 F2 F3  .  .  .  . B0 B1 B2 B3",
        " . F0 F1 F2 F3  .  . B0 B1 B2 B3",
        " .  . F0 F1 F2 F3 B0 B1 B2 B3",
    ]


def test_two_branches_and_a_join():
    """0 -> 2 <- 1 as a graph: both branches start at once, and the pipeline is 2 deep, not 3."""
    edges = ((0, 2), (1, 2))
    cost = cost_model(edges, [1, 1, 1], [1, 1, 1], cluster(3))
    timeline = simulate(stage_graph(edges, [(0,), (1,), (2,)], 4), cost)
    assert draw(timeline) == [
        "F0 F1  . B0 F2 B1 F3 B2  . B3",
        "F0 F1  . B0 F2 B1 F3 B2  . B3",
        " . F0 B0 F1 B1 F2 B2 F3 B3",
    ]
    assert timeline.step_s == 10


def test_unequal_microbatch_sizes():
    """Stage 0 in ones, stage 1 in twos with 2 s each: it waits for both halves."""
    cost = cost_model(chain(2), [1, 1], [1, 1], cluster(2))
    timeline = simulate(stage_graph(chain(2), [(0,), (1,)], 4, [1, 2]), cost)
    assert draw(timeline) == [
        "F0 F1 F2 F3  .  . B0 B1  .  . B2 B3",
        " .  . F0 F0 B0 B0 F1 F1 B1 B1",
    ]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("stages", "microbatches"), [(1, 1), (2, 8), (4, 4), (5, 3), (8, 32)])
def test_equal_chains_have_a_closed_form(schedule, stages, microbatches):
    """(M + S - 1)(F + B), and the bubble is (S - 1) / (M + S - 1)."""
    timeline = free_chain(stages, microbatches, schedule, f=0.5, b=1.25)
    assert timeline.step_s == pytest.approx((microbatches + stages - 1) * 1.75)
    assert timeline.bubble == pytest.approx((stages - 1) / (microbatches + stages - 1))


@pytest.mark.parametrize(
    ("schedule", "held"),
    [("gpipe", [9, 9, 9, 9]), ("1f1b", [4, 3, 2, 1]), ("1f1b-deep", [7, 5, 3, 1])],
)
def test_activations_follow_the_warm_up(schedule, held):
    """GPipe holds all M micro-batches, 1F1B as many as there are stages to come."""
    cost = cost_model(chain(4), [1] * 4, [1] * 4, cluster(4), kept_bytes=100)
    timeline = simulate(stage_graph(chain(4), [(i,) for i in range(4)], 9), cost, schedule)
    assert [timeline.peak_bytes[d] for d in range(4)] == [100 * n for n in held]
    assert all(timeline.memory[d][-1][1] == 0 for d in range(4))


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
def test_peak_memory_is_what_the_cost_model_says(schedule, recompute):
    """So a plan that fits by the formula fits on the clock, and the other way round. Gradients that
    wait take memory besides, which the formula does not know.
    """
    edges = ((0, 1), (0, 2), (1, 3), (2, 3))
    cost = cost_model(
        edges,
        [1] * 4,
        [2] * 4,
        cluster(5),
        value_bytes=10,
        parameter_bytes=1000,
        kept_bytes=70,
        waiting_bytes=40,
    )
    graph = stage_graph(edges, [(0,), (1,), (2, 3), (4,)], 24, [2, 2, 2, 4])
    graph = replace(graph, stages=tuple(replace(s, recompute=recompute) for s in graph.stages))
    warm = SCHEDULES[schedule]().warm_up(graph)
    timeline = simulate(graph, cost, schedule)
    for s, stage in enumerate(warm.stages):
        expected = stage_bytes(warm, cost, s, in_flight=stage.in_flight)
        peaks = [timeline.peak_bytes[d] for d in stage.devices]
        waits = schedule.startswith("zb") and warm.predecessors[s]
        assert min(peaks) > expected if waits else peaks == [expected] * stage.replicas


def test_a_frozen_stage_takes_what_its_forward_does():
    """50 bytes while it computes: its backwards take no time, and it keeps nothing."""
    cost = cost_model(chain(2), [1, 1], [0, 2], cluster(2))
    working = tuple(replace(costs, working_bytes=50) for costs in cost.profile.costs)
    cost = replace(cost, profile=replace(cost.profile, costs=working))
    timeline = simulate(stage_graph(chain(2), [(0,), (1,)], 2), cost)
    assert [timeline.peak_bytes[d] for d in range(2)] == [50, 50]


def test_a_message_takes_latency_and_bandwidth():
    """8 bytes at 4 bytes/s and 1 s of latency: 3 s there and 3 s back."""
    cost = cost_model(chain(2), [1, 1], [1, 1], cluster(2, bandwidth=4, latency_s=1), value_bytes=8)
    timeline = simulate(stage_graph(chain(2), [(0,), (1,)], 1), cost)
    assert draw(timeline) == ["F0  .  .  .  .  .  .  .  . B0", " .  .  .  . F0 B0"]
    sends = [s for s in timeline.spans if s.action.kind is Kind.SEND_FORWARD]
    assert [(s.device, s.start, s.end) for s in sends] == [(0, 1, 4)]
    receives = [s for s in timeline.spans if s.action.kind is Kind.RECEIVE_FORWARD]
    assert [(s.device, s.start, s.end) for s in receives] == [(1, 1, 4)]


def test_messages_overlap_compute():
    """1 s of transfer behind 1 s of compute costs the warm-up two hops and nothing in between."""
    cost = cost_model(chain(2), [1, 1], [1, 1], cluster(2, bandwidth=1), value_bytes=1)
    timeline = simulate(stage_graph(chain(2), [(0,), (1,)], 4), cost, "1f1b-deep")
    assert draw(timeline) == [
        "F0 F1 F2  .  . B0 F3 B1  . B2  . B3",
        " .  . F0 B0 F1 B1 F2 B2 F3 B3",
    ]


def test_a_port_serves_first_come_first():
    """Two branches reach the join's incoming link at once: the second message waits 2 s."""
    edges = ((0, 2), (1, 2))
    cost = cost_model(edges, [1, 1, 1], [1, 1, 1], cluster(3, bandwidth=1), value_bytes=2)
    timeline = simulate(stage_graph(edges, [(0,), (1,), (2,)], 1), cost)
    sends = [s for s in timeline.spans if s.action.kind is Kind.SEND_FORWARD]
    assert [(s.device, s.start, s.end) for s in sends] == [(0, 1, 3), (1, 3, 5)]


def test_a_node_shares_its_network_card():
    """Devices 0, 1 of one node send to 2, 3 of the other: own links, one card."""
    edges = ((0, 2), (1, 3))
    cost = cost_model(edges, [1] * 4, [1] * 4, cluster(2, 2, bandwidth=1), value_bytes=2)
    graph = stage_graph(edges, [(0,), (1,), (2,), (3,)], 1)
    sends = [s for s in simulate(graph, cost).spans if s.action.kind is Kind.SEND_FORWARD]
    assert [(s.start, s.end) for s in sends] == [(1, 3), (3, 5)]
    # Within a node nothing is shared.
    near = cost_model(edges, [1] * 4, [1] * 4, cluster(4, bandwidth=1), value_bytes=2)
    sends = [s for s in simulate(graph, near).spans if s.action.kind is Kind.SEND_FORWARD]
    assert [(s.start, s.end) for s in sends] == [(1, 3), (1, 3)]


def test_devices_with_cards_of_their_own_do_not_wait_for_each_other():
    """The same messages with two cards in each node; and an all-reduce of one device per node has
    one card, of both devices two: 2 * 1/2 * 8 bytes at 1 byte/s, 2 * 3/4 * 8 at 2.
    """
    edges = ((0, 2), (1, 3))
    machines = cluster(2, 2, bandwidth=1, cards=2)
    cost = cost_model(edges, [1] * 4, [1] * 4, machines, value_bytes=2)
    graph = stage_graph(edges, [(0,), (1,), (2,), (3,)], 1)
    sends = [s for s in simulate(graph, cost).spans if s.action.kind is Kind.SEND_FORWARD]
    assert [(s.start, s.end) for s in sends] == [(1, 3), (1, 3)]
    faster = replace(
        machines, levels=(replace(machines.levels[0], bandwidth=9.0), machines.levels[1])
    )
    summing = cost_model((), [1], [1], faster, parameter_bytes=8)
    for devices, seconds in (((0, 2), 8.0), ((0, 1, 2, 3), 6.0)):
        timeline = simulate(stage_graph((), [devices], 4, [4]), summing)
        assert timeline.step_s - timeline.makespan_s == seconds


def test_a_receive_is_posted_for_one_microbatch():
    """Stage 1 takes 9 s; message 2 moves only when micro-batch 1 has been taken."""
    cost = cost_model(chain(2), [1, 9], [1, 1], cluster(2, bandwidth=1), value_bytes=1)
    timeline = simulate(stage_graph(chain(2), [(0,), (1,)], 3), cost, "gpipe")
    sends = [s.start for s in timeline.spans if s.action.kind is Kind.SEND_FORWARD]
    assert sends == [1, 2, 11]


def test_receives_are_posted_by_microbatches_of_the_receiver():
    """Stage 1 in twos gets both messages of a micro-batch ahead, stage 0 sends in ones."""
    cost = cost_model(chain(2), [1, 4], [1, 1], cluster(2, bandwidth=1), value_bytes=1)
    timeline = simulate(stage_graph(chain(2), [(0,), (1,)], 4, [1, 2]), cost, "gpipe")
    starts = [s.start for s in timeline.spans if s.action.kind is Kind.SEND_FORWARD]
    assert starts == [1, 2, 3, 4]


def test_replicas_sum_gradients_after_their_last_backward():
    """Ring over 2 devices: 2 * 1/2 * 8 bytes / 4 bytes/s = 2 s after the last backward at 8 s."""
    cost = cost_model((), [4], [4], cluster(2, bandwidth=4), parameter_bytes=8)
    timeline = simulate(stage_graph((), [(0, 1)], 2, [2]), cost)
    assert timeline.makespan_s == 8
    assert timeline.step_s == 10


def test_tied_parameters_are_summed_over_their_stages():
    """Stages 0 and 1 share a parameter: one exchange when both are done."""
    cost = cost_model(
        chain(2), [1, 1], [1, 1], cluster(2, bandwidth=4), parameter_bytes=8, tied=(0, 1)
    )
    timeline = simulate(stage_graph(chain(2), [(0,), (1,)], 1), cost)
    assert (timeline.makespan_s, timeline.step_s) == (4, 6)


def test_an_all_reduce_overlaps_other_stages():
    """The last stage is done first; its 2 s of all-reduce hide behind the others' backwards."""
    cost = cost_model(chain(2), [4, 4], [4, 4], cluster(4, bandwidth=4), parameter_bytes=8)
    graph = stage_graph(chain(2), [(0,), (1, 2)], 2, [2, 2])
    timeline = simulate(graph, cost)
    assert timeline.step_s == timeline.makespan_s == 8 + 4 + 4 + 8


def test_devices_that_share_cores_slow_each_other():
    """Two independent stages on one core take twice as long; on two cores they do not."""
    cost = cost_model((), [1, 1], [1, 1], cluster(2))
    graph = stage_graph((), [(0,), (1,)], 1)

    def on(cores: int) -> float:
        shared = replace(cost, cluster=replace(cost.cluster, cores=cores))
        return simulate(graph, shared).step_s

    assert (on(1), on(2), on(0)) == pytest.approx((4, 2, 2))


def test_edges_without_values_order_two_stages():
    """As a system that knows only chains does; without the edge they run side by side."""
    cost = cost_model((), [1, 1], [1, 1], cluster(2))
    in_a_row = stage_graph(((0, 1),), [(0,), (1,)], 1)
    assert draw(simulate(in_a_row, cost)) == ["F0  .  . B0", " . F0 B0"]
    side_by_side = stage_graph((), [(0,), (1,)], 1)
    assert draw(simulate(side_by_side, cost)) == ["F0 B0", "F0 B0"]


def test_measured_stage_times_replace_the_model():
    """Free links; 2 samples on each device at 3 s, the short last one in proportion."""
    graph = stage_graph(chain(2), [(0,), (1,)], 5, [2, 2])
    rule = SCHEDULES["1f1b"]()
    graph = rule.warm_up(graph)
    times = StageTimes(forward_s=[{2: 2.0}] * 2, backward_s=[{2: 2.0, 1: 3.0}] * 2)
    assert draw(run(graph, rule.order(graph), times)) == [
        "F0 F0 F1 F1  .  . B0 B0 F2  . B1 B1  .  . B2 B2 B2",
        " .  . F0 F0 B0 B0 F1 F1 B1 B1 F2 B2 B2 B2",
    ]


def test_a_deadlock_is_reported_not_endless():
    """Whoever hands over a hand-written schedule learns what waits for what."""
    graph = StageGraph((Stage(("op0",), (0,), 1), Stage(("op1",), (1,), 1)), ((0, 1),), 2)
    schedule = Schedule.parse("0: 0F0 0B0 0F1 0B1\n1: 1F0 1F1 1B0 1B1")
    with pytest.raises(DeadlockError, match="waits for samples 1 to 1 from stage 0"):
        run(graph, schedule, StageTimes([{1: 1.0}] * 2, [{1: 1.0}] * 2))


def test_stages_of_one_device_are_not_simulated_against_their_edge():
    """A hand-written list that uses a value before it is made has no step time."""
    graph = StageGraph((Stage(("op0",), (0,), 1), Stage(("op1",), (0,), 1)), ((0, 1),), 1)
    with pytest.raises(InvalidScheduleError, match="step 1 of 4: it comes before forward 0"):
        run(graph, Schedule.parse("0: 1F0 0F0 0B0 1B0"), StageTimes([{1: 1.0}] * 2, [{1: 1.0}] * 2))


def test_a_plan_for_another_model_is_refused():
    """Operators by name; the message has one of them."""
    cost = cost_model((), [1], [1], cluster(1))
    with pytest.raises(InvalidPlanError, match="op1"):
        simulate(stage_graph((), [(0,), (1,)], 1), cost)


def test_a_cluster_that_is_too_small_is_refused():
    """Before anything is looked up."""
    cost = cost_model((), [1, 1], [1, 1], cluster(1))
    with pytest.raises(InvalidPlanError, match="device 1, but test has 1 device"):
        simulate(stage_graph((), [(0,), (1,)], 1), cost)


@given(stage_graphs(max_stages=5, max_replicas=3), st.sampled_from(sorted(SCHEDULES)))
def test_any_graph_runs_the_same_each_time(graph, schedule):
    """Deterministic, recorded or not, never below the busiest device, every action once."""
    rule = SCHEDULES[schedule]()
    graph = rule.warm_up(graph)
    order = rule.order(graph)
    times = StageTimes([{1: 1.0 + s} for s in range(len(graph))], [{1: 2.0}] * len(graph))
    timeline = run(graph, order, times)
    assert timeline == run(graph, order, times)
    assert timeline.step_s == step_seconds(graph, order, times)
    assert timeline.step_s >= max(timeline.busy_s.values())
    compute = [s for s in timeline.spans if s.action.kind.is_compute]
    assert len(compute) == sum(map(len, order.actions.values()))


@given(stage_graphs(max_stages=5, max_replicas=3), st.sampled_from(sorted(SCHEDULES)), st.data())
def test_seconds_alone_are_those_of_the_timeline(graph, schedule, data):
    """To the last bit, with ports and cores that are shared, all-reduces, and many ties.

    ``run`` compiles actions one by one, ``step_seconds`` whole edges.
    """
    whole = st.lists(st.integers(0, 4), min_size=len(graph), max_size=len(graph))
    machines = cluster(2, -(-len(graph.devices) // 2), bandwidth=2, latency_s=0.5)
    cost = cost_model(
        graph.edges[::2],
        data.draw(whole),
        data.draw(whole),
        replace(machines, cores=data.draw(st.sampled_from([0, 0, 2]))),
        value_bytes=data.draw(st.integers(0, 3)),
        parameter_bytes=data.draw(st.sampled_from([0, 12])),
    )
    stages = [(s.devices, s.microbatch_size) for s in graph.stages]
    devices, sizes = (list(each) for each in zip(*stages, strict=True))
    rule = SCHEDULES[schedule]()
    warm = rule.warm_up(stage_graph(graph.edges, devices, graph.batch_size, sizes))
    order = rule.order(warm)
    costs = ModelCosts(warm, cost)
    timeline = run(warm, order, costs)
    assert step_seconds(warm, order, costs) == timeline.step_s
    lowered = lower(order, warm, costs.message_edges)
    check(lowered, warm, costs.message_edges)
    assert len(timeline.spans) == sum(map(len, lowered.actions.values()))
    least = least_step_s(warm, costs, split=schedule in SPLIT_BACKWARDS)
    assert least <= timeline.step_s * (1 + 1e-9)


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=5),
    st.integers(1, 8),
    st.sampled_from(sorted(SCHEDULES)),
    st.integers(1, 100),
)
def test_a_faster_link_never_slows_a_chain(stages, microbatches, schedule, bandwidth):
    """On a chain each port has one sender and one order, so no message can get in another's way."""
    edges = chain(len(stages))
    forward, backward = [f for f, _ in stages], [b for _, b in stages]
    graph = stage_graph(edges, [(i,) for i in range(len(stages))], microbatches)

    def step(speed: float) -> float:
        machines = cluster(len(stages), bandwidth=speed, latency_s=1 / speed)
        return simulate(
            graph, cost_model(edges, forward, backward, machines, value_bytes=9), schedule
        ).step_s

    assert step(2.0 * bandwidth) <= step(bandwidth) + 1e-9
