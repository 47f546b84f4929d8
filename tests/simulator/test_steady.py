"""Long steps from short ones, against the whole simulation."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.plans.edges import MessageEdges
from anabranch.plans.stages import Stage, StageGraph
from anabranch.schedule import SCHEDULES
from anabranch.simulator.costs import ModelCosts, StageTimes
from anabranch.simulator.run import step_seconds
from anabranch.simulator.steady import Estimate, estimate_step_s
from tests.simulator.helpers import chain, cluster, cost_model, stage_graph

TWO_TOWERS = ((0, 2), (1, 2), (2, 3))


def free_chain(microbatches: int, schedule: str) -> tuple[StageGraph, StageTimes]:
    """Four stages of 1 + 2 s with free links."""
    graph = stage_graph(chain(4), [(i,) for i in range(4)], microbatches)
    return SCHEDULES[schedule]().warm_up(graph), StageTimes([{1: 1.0}] * 4, [{1: 2.0}] * 4)


def seconds(*arguments) -> float:
    """The estimate, which must be there."""
    found = estimate_step_s(*arguments)
    assert found is not None
    return found.seconds


@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
def test_equal_chains_have_a_closed_form(schedule):
    """M(F + B) + (S - 1)(F + B), also for more micro-batches than anybody would simulate. The way
    back takes half of B with split backwards, and nothing where weights wait for the gaps. These
    have fewer, as their counts in flight come from a list of all passes.
    """
    microbatches = 10**3 if schedule.startswith("zb") else 10**5
    graph, times = free_chain(microbatches, schedule)
    order = SCHEDULES[schedule]().order
    hop = 1 if schedule.startswith("zb") else 2 if schedule.endswith("split") else 3
    assert seconds(graph, order, times) == pytest.approx(microbatches * 3 + 3 * hop, rel=1e-12)


@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
def test_short_steps_are_for_the_simulator(schedule):
    """With so few micro-batches there is nothing to save."""
    graph, times = free_chain(12, schedule)
    assert estimate_step_s(graph, SCHEDULES[schedule]().order, times) is None


def test_a_period_of_two_microbatches():
    """Stage 0 runs groups of two, stage 1 whole twos: units of two samples, and an odd batch."""
    stages = (Stage(("a",), (0,), 1, k=2), Stage(("b",), (1,), 2))
    graph = SCHEDULES["1f1b"]().warm_up(StageGraph(stages, ((0, 1),), 401))
    times = StageTimes([{1: 1.0}, {2: 3.0, 1: 2.0}], [{1: 2.0}, {2: 5.0, 1: 3.0}])
    order = SCHEDULES["1f1b"]().order
    expected = step_seconds(graph, order(graph), times)
    assert seconds(graph, order, times) == pytest.approx(expected, rel=1e-12)


def test_a_replica_without_samples_does_not_count():
    """Micro-batches of one sample on two replicas: the first has nothing to do, at any time."""
    graph = stage_graph(chain(2), [(0,), (1, 2)], 300)
    graph = SCHEDULES["1f1b"]().warm_up(graph)
    times = StageTimes([{1: 1.0}] * 2, [{1: 2.0}] * 2)
    order = SCHEDULES["1f1b"]().order
    assert seconds(graph, order, times) == (300 + 1) * 3


def test_where_devices_go_at_a_pace_of_their_own_the_slowest_counts():
    """Stage 0 gets no gradients and runs ahead: an estimate, which is not said to be sure."""
    graph, times = free_chain(400, "1f1b")
    free = replace(
        times, forward_s=[{1: 0.5}, *[{1: 1.0}] * 3], message_edges=MessageEdges(back=())
    )
    order = SCHEDULES["1f1b"]().order
    found = estimate_step_s(graph, order, free)
    assert found == Estimate(step_seconds(graph, order(graph), free), periodic=False)


@pytest.mark.parametrize("schedule", ["1f1b", "1f1b-deep"])
def test_all_reduces_and_shared_cards_are_in_it(schedule):
    """Two towers on two nodes whose cards are busy, with gradients to sum up at the end."""
    machines = cluster(4, 2, bandwidth=8, latency_s=0.25)
    cost = cost_model(
        TWO_TOWERS,
        [2, 3, 2, 4],
        [4, 5, 3, 8],
        machines,
        value_bytes=4,
        parameter_bytes=128,
    )
    devices = [(0, 1), (4, 5), (2, 6), (3, 7)]
    graph = stage_graph(TWO_TOWERS, devices, 1602, [4, 4, 4, 4])
    graph = SCHEDULES[schedule]().warm_up(graph)
    order, costs = SCHEDULES[schedule]().order, ModelCosts(graph, cost)
    expected = step_seconds(graph, order(graph), costs)
    assert seconds(graph, order, costs) == pytest.approx(expected, rel=1e-12)


@st.composite
def long_plans(draw: st.DrawFn) -> tuple[StageGraph, ModelCosts]:
    """Connected stages whose gradients all come back, on two nodes, and many micro-batches."""
    count = draw(st.integers(2, 4))
    skips = [(x, y) for y in range(count) for x in range(y - 1)]
    edges = tuple(sorted({*chain(count), *(e for e in skips if draw(st.booleans()))}))
    devices: list[tuple[int, ...]] = []
    for _ in range(count):
        first = sum(map(len, devices))
        devices.append(tuple(range(first, first + draw(st.integers(1, 2)))))
    sizes = [draw(st.sampled_from([2, 4])) for _ in range(count)]
    graph = stage_graph(edges, devices, draw(st.integers(280, 300)), sizes)
    seconds = st.lists(st.integers(0, 5), min_size=count, max_size=count)
    machines = cluster(
        -(-sum(map(len, devices)) // 2), 2, bandwidth=draw(st.sampled_from([1, 4])), latency_s=0.5
    )
    forward, backward = draw(seconds), draw(seconds)
    cost = cost_model(
        edges,
        forward,
        backward,
        machines,
        value_bytes=draw(st.integers(0, 4)),
        parameter_bytes=draw(st.sampled_from([0, 12])),
    )
    return graph, ModelCosts(graph, cost)


@given(long_plans(), st.sampled_from(["1f1b", "1f1b-deep"]))
def test_what_is_found_is_exact(plan, schedule):
    """Where all devices go at one pace, the step is that of the whole simulation: to the last
    digits for all but one in thousands of random plans, whose messages are as slow as compute.
    """
    graph, costs = plan
    rule = SCHEDULES[schedule]()
    graph = rule.warm_up(graph)
    found = estimate_step_s(graph, rule.order, costs)
    if found is not None and found.periodic:
        assert found.seconds == pytest.approx(
            step_seconds(graph, rule.order(graph), costs), rel=5e-3
        )


@given(long_plans(), st.sampled_from(["1f1b", "1f1b-deep"]))
def test_a_rough_estimate_is_near(plan, schedule):
    """Within a tenth where there is any; it is to pass over plans, not to choose one."""
    graph, costs = plan
    rule = SCHEDULES[schedule]()
    graph = rule.warm_up(graph)
    found = estimate_step_s(graph, rule.order, costs)
    if found is not None:
        assert found.seconds == pytest.approx(
            step_seconds(graph, rule.order(graph), costs), rel=0.1
        )
