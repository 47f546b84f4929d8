"""Ways to run a proposal, lower bounds of its seconds, and what decides between equal times."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.plans.stages import StageGraph
from anabranch.schedule import SCHEDULES, SPLIT_BACKWARDS
from anabranch.simulator import objective
from anabranch.simulator.costs import ModelCosts
from anabranch.simulator.judge import Judge
from anabranch.simulator.messages import port_seconds
from anabranch.simulator.objective import ShortestPeriod, ShortestStep, least_step_s
from anabranch.weights import policy_named
from tests.simulator.helpers import chain, cluster, cost_model, simulate, stage_graph
from tests.strategies import stage_graphs

TWO = stage_graph(chain(2), [(0,), (1,)], 8)


@pytest.fixture
def cost():
    """Two equal operators on two devices, 100 bytes of weights each."""
    return cost_model(chain(2), [1.0] * 2, [1.0] * 2, cluster(2), parameter_bytes=100)


def test_a_step_runs_under_each_schedule_and_a_period_under_one(cost):
    """With one version of the weights, or those of the policy; the latter for its own batch."""
    step = ShortestStep(cost, ("1f1b", "gpipe"))
    prices = step.prices(TWO)
    runs = [
        (schedule, [stage.in_flight for stage in graph.stages])
        for graph, schedule in step.runs(prices)
    ]
    assert (prices.versions, runs) == ((), [("1f1b", [2, 1]), ("gpipe", [8, 8])])
    period = ShortestPeriod(cost, policy_named("stash"), 1)
    prices = period.prices(TWO)
    ((graph, schedule),) = period.runs(prices)
    assert (graph.batch_size, schedule, prices.versions) == (1, "1f1b", (2, 1))


def test_a_deep_warm_up_is_as_deep_as_fits_beside_sums_that_take_more():
    """Three replicas have 4,001 bytes whatever is in flight. While gradients are summed 4,000 more,
    in a backward 2,000 and 800 for each micro-batch: of five that are wanted four fit.
    """
    machines = cluster(5, memory_bytes=9300)
    cost = cost_model(
        *(chain(3), [1.0] * 3, [1.0] * 3, machines),
        **{"parameter_bytes": 2000, "kept_bytes": 800, "value_bytes": 1},
    )
    objective = ShortestStep(replace(cost, optimizer_factor=0.0), ("1f1b", "1f1b-deep"))
    prices = objective.prices(stage_graph(chain(3), [(0, 1, 2), (3,), (4,)], 60, [3] * 3))
    in_flight = [graph.stages[0].in_flight for graph, _ in objective.runs(prices)]
    assert [(n, float(prices.held(0).peak(n))) for n in in_flight] == [(3, 8401), (4, 9201)]


@pytest.mark.parametrize("is_async", [False, True])
def test_of_equal_times_less_recomputation_wins(cost, is_async):
    """Operators whose forward costs nothing are as quick with recomputation as without."""
    free = replace(
        cost,
        profile=replace(
            cost.profile, costs=tuple(replace(op, forward_s=(0.0,)) for op in cost.profile.costs)
        ),
    )
    again = replace(TWO, stages=tuple(replace(stage, recompute=True) for stage in TWO.stages))
    objective = (
        ShortestPeriod(free, policy_named("naive"), 1)
        if is_async
        else ShortestStep(free, ("1f1b",))
    )
    judge = Judge(objective)
    judge.consider([again, TWO])
    assert judge.winner("test").proposal == TWO


def test_a_step_is_simulated_once(cost, monkeypatch):
    """Whoever asks again with the same prices has the same seconds: 1001 * 2 s here."""
    step = ShortestStep(cost, ("1f1b",))
    judge = Judge(step)
    judge.consider([replace(TWO, batch_size=1000)])
    candidate = judge.winner("test")
    assert judge.best_s == pytest.approx(2002)
    monkeypatch.setattr(objective, "step_seconds", None)
    assert step.measure(candidate) == (judge.best_s, 2000)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_tight_on_equal_chains(schedule):
    """With free links it is the closed form."""
    cost = cost_model(chain(4), [1] * 4, [2] * 4, cluster(4))
    graph = stage_graph(chain(4), [(i,) for i in range(4)], 6)
    least = least_step_s(graph, ModelCosts(graph, cost))
    assert least == simulate(graph, cost, schedule).step_s == (6 + 3) * 3


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_gradients_of_weights_are_computed_while_others_go_back(stages: int):
    """A chain whose memory holds every micro-batch works without a bubble, and meets the bound."""
    cost = cost_model(chain(stages), [1] * stages, [2] * stages, cluster(stages))
    graph = stage_graph(chain(stages), [(i,) for i in range(stages)], 8)
    least = least_step_s(graph, ModelCosts(graph, cost), split=True)
    assert least == simulate(graph, cost, "zb-h2").step_s


def test_includes_the_all_reduce():
    """4 s + 4 s of compute, 2 s of ring."""
    cost = cost_model((), [4], [4], cluster(2, bandwidth=4), parameter_bytes=8)
    graph = stage_graph((), [(0, 1)], 2, [2])
    assert least_step_s(graph, ModelCosts(graph, cost)) == 10


def test_ports_carry_messages_and_sums():
    """Four messages of 4 s each leave device 0."""
    cost = cost_model(chain(2), [1] * 2, [1] * 2, cluster(2, bandwidth=2), value_bytes=8)
    graph = stage_graph(chain(2), [(0,), (1,)], 4)
    assert max(port_seconds(ModelCosts(graph, cost), graph).values()) == 16


@pytest.mark.parametrize("is_alone", [True, False])
@given(graph=stage_graphs(max_stages=5, max_replicas=3), data=st.data())
def test_no_step_is_shorter(graph: StageGraph, data: st.DataObject, is_alone: bool):
    """Otherwise pruning by it would lose the best plan; with stages alone on their devices and
    messages that take time, and with every stage on one of few.
    """
    count = len(graph.devices) if is_alone else data.draw(st.integers(1, 3))
    seconds = st.lists(st.integers(0, 5), min_size=len(graph), max_size=len(graph))
    times = data.draw(seconds), data.draw(seconds)
    if is_alone:
        sizes = {"parameter_bytes": 16, "value_bytes": data.draw(st.integers(0, 16))}
        cost = cost_model(graph.edges, *times, cluster(count, bandwidth=8, latency_s=0.5), **sizes)
        devices = [stage.devices for stage in graph.stages]
    else:
        cost = cost_model(graph.edges, *times, cluster(count))
        devices = [(data.draw(st.integers(0, count - 1)),) for _ in graph.stages]
    microbatches = [stage.microbatch_size for stage in graph.stages]
    plain = stage_graph(graph.edges, devices, graph.batch_size, microbatches)
    schedule, costs = data.draw(st.sampled_from(sorted(SCHEDULES))), ModelCosts(plain, cost)
    least = least_step_s(plain, costs, split=schedule in SPLIT_BACKWARDS)
    carried = port_seconds(costs, plain).values()
    assert max([least, *carried]) <= simulate(plain, cost, schedule).step_s * (1 + 1e-9)


def test_stages_of_a_device_take_turns():
    """Two stages of 3 s on one device, four micro-batches: 24 s, not 4 x 3 s behind the first."""
    cost = cost_model(chain(2), [1] * 2, [2] * 2, cluster(1))
    graph = stage_graph(chain(2), [(0,), (0,)], 4)
    assert (
        least_step_s(graph, ModelCosts(graph, cost)) == 24 == simulate(graph, cost, "1f1b").step_s
    )


def test_stages_of_a_device_share_its_memory():
    """One micro-batch takes 10 bytes of each stage, and the first stage holds two at least: of 60
    bytes 30 are left, 15 for each stage, which is one more.
    """
    cost = cost_model(
        chain(2), [1] * 2, [2] * 2, cluster(1, memory_bytes=60), kept_bytes=10, value_bytes=0
    )
    graph = stage_graph(chain(2), [(0,), (0,)], 9)
    costs = ModelCosts(graph, cost)
    assert [costs.most_in_flight(s, 60) for s in (0, 1)] == [3, 2]
    assert costs.peak_bytes([3, 2]) == 50
