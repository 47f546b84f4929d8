"""Split backwards at the end of a search: where they pay, and fit."""

from dataclasses import replace

import pytest

from anabranch.errors import InfeasiblePlanError
from anabranch.schedule import SPLIT_BACKWARDS
from anabranch.simulator.costs import ModelCosts, with_lengths
from anabranch.simulator.judge import Judge
from anabranch.simulator.objective import ShortestStep
from anabranch.solve import contest, schedule_choice, simulate
from anabranch.solve.schedule_choice import split_backwards
from anabranch.solve.settings import SETTINGS
from tests.simulator.helpers import chain, cluster, cost_model, stage_graph
from tests.solve.helpers import found, two_stages


@pytest.fixture(autouse=True)
def whole_backwards(monkeypatch):
    """Not here."""
    for module in (contest, schedule_choice):
        monkeypatch.setattr(module, "split_backwards", split_backwards)


def test_few_micro_batches(propose):
    """Two stages of 1 + 1 s, 4 micro-batches: (M + 1)(F + B) = 10 s under 1F1B; the way back takes
    half of B where weights wait, and nothing of it is in the drain: M (F + B) + F = 9 s.
    """
    cost, graph = two_stages(4)
    propose(graph)
    best = found(cost, 4)
    assert best.schedule in SPLIT_BACKWARDS
    assert best.predicted.step_s == pytest.approx(9.0)
    assert found(cost, 4, schedule="1f1b").predicted.step_s == pytest.approx(10.0)


def test_a_simulation_chooses_as_a_search_does(propose):
    """Of a plan with whole backwards, where it may take any schedule."""
    cost, graph = two_stages(4)
    propose(graph)
    whole = found(cost, 4, schedule="1f1b")
    assert simulate(whole, cost.profile, cost.cluster).step_s == pytest.approx(10.0)
    step = simulate(whole, cost.profile, cost.cluster, schedule="auto")
    assert step.step_s == pytest.approx(9.0)


def test_many_micro_batches_gain_too_little(propose):
    """Of 100 micro-batches the drain is half a percent."""
    cost, graph = two_stages(100)
    propose(graph)
    assert found(cost, 100).schedule == "1f1b"


def test_memory_is_that_of_the_simulated_step(propose):
    """Eight stages, 16 micro-batches, whose weights take a quarter of a backward: with twice the
    memory (H2) the step is shorter than where a device holds eight micro-batches, as the first one
    does under 1F1B (H1).
    """
    graph = stage_graph(chain(8), [(i,) for i in range(8)], 16)

    def scheduled(nbytes: int) -> tuple[str, float, int]:
        machines = cluster(8, memory_bytes=nbytes)
        cost = cost_model(chain(8), [1] * 8, [2] * 8, machines, kept_bytes=100)
        costs = tuple(replace(op, weight_s=(0.5,)) for op in cost.profile.costs)
        cost = replace(cost, profile=replace(cost.profile, costs=costs))
        propose(graph)
        best = found(cost, 16, optimizer_factor=0.0)
        return best.schedule, best.predicted.step_s, max(best.predicted.device_peak_bytes)

    schedule, step_s, peak = scheduled(10**6)
    assert (schedule, step_s) == ("zb-h2", pytest.approx(58.0))
    assert peak > 800
    _, step_s, peak = scheduled(800)
    assert step_s > 58.0
    assert peak <= 800


@pytest.mark.parametrize("fits", [True, False])
def test_gradients_of_weights_that_wait_are_in_memory(propose, fits):
    """Four stages that recompute keep all that their operators need from the gradient of the inputs
    to that of the weights: 105 bytes at most where both are one, and 405 where four wait under H1.
    """
    graph = stage_graph(chain(4), [(i,) for i in range(4)], 16)
    graph = replace(graph, stages=tuple(replace(s, recompute=True) for s in graph.stages))
    machines = cluster(4, memory_bytes=405 - (not fits))
    cost = cost_model(chain(4), [1] * 4, [2] * 4, machines, kept_bytes=100, value_bytes=1)
    propose(graph)
    whole = found(cost, 16, optimizer_factor=0.0, schedule="1f1b")
    assert max(whole.predicted.device_peak_bytes) == 105
    if fits:
        best = found(cost, 16, optimizer_factor=0.0, schedule="zb-h1")
        assert max(best.predicted.device_peak_bytes) == 405
    else:
        with pytest.raises(InfeasiblePlanError, match="weights that wait under zb-h1"):
            found(cost, 16, optimizer_factor=0.0, schedule="zb-h1")


@pytest.mark.parametrize(
    ("latency_s", "limit", "near", "tried"),
    [
        (0.0, None, 1.2, ["1f1b-deep-split", "1f1b-split", "zb-h1", "zb-h2"]),
        (0.5, 17.0, 1.2, ["1f1b-deep-split", "1f1b-split", "zb-h1", "zb-h2"]),
        (0.5, 17.0, 1.1, ["1f1b-deep-split", "1f1b-split", "zb-h1"]),
        (2.0, None, 1.2, ["1f1b-deep-split", "1f1b-split"]),
        (2.0, 18.0, 1.2, ["1f1b-deep-split"]),
    ],
)
def test_schedules_are_not_tried_without_hope(latency_s, limit, near, tried, monkeypatch):
    """Two stages of 1 + 1 s: with messages of 2 s, two micro-batches in flight take 8 s, as three
    do, so lists are left out; and all others, too, where a deep warm-up takes far longer than the
    best. With messages of half a second a deep warm-up takes 18.5 s and the first list 20 s; where
    that is too far from a best of 17 s, the second is left out.
    """
    cost = cost_model(chain(2), [1, 1], [1, 1], cluster(2, latency_s=latency_s), value_bytes=1)
    judge, names = Judge(ShortestStep(cost, schedule_choice.AUTO)), []
    judge.consider([stage_graph(chain(2), [(0,), (1,)], 8)])

    def recorded(cost, schedules):
        names.extend(name for name in schedules if name in SPLIT_BACKWARDS)
        return ShortestStep(cost, schedules)

    monkeypatch.setattr(schedule_choice, "ShortestStep", recorded)
    monkeypatch.setattr(schedule_choice, "SETTINGS", replace(SETTINGS, schedules_near=near))
    split_backwards(judge, cost, limit=limit)
    assert names == tried


def test_lists_know_how_long_passes_and_messages_take():
    """Four samples a micro-batch: 1 + 2 s of a sample at the first stage, 2 + 6 s at the second; a
    message of 4 bytes takes 8 + 2 s.
    """
    machines = cluster(2, bandwidth=0.5, latency_s=2.0)
    cost = cost_model(chain(2), [1, 2], [2, 6], machines, value_bytes=1)
    graph = stage_graph(chain(2), [(0,), (1,)], 8, [4, 4])
    first, second = with_lengths(ModelCosts(graph, cost)).stages
    assert (first.load, first.backward_factor, first.message) == (0.375, 2.0, 0.312)
    assert (second.load, second.backward_factor, second.message) == (1.0, 3.0, 0.0)


def test_a_list_that_is_asked_for_by_name_knows_them_too(propose):
    """The second of two stages takes twice as long."""
    machines = cluster(2)
    cost = cost_model(chain(2), [1, 2], [2, 4], machines)
    propose(stage_graph(chain(2), [(0,), (1,)], 4, [1, 1]))
    planned = found(cost, 4, schedule="zb-h1")
    assert [stage.load for stage in planned.stage_graph.stages] == [0.5, 1.0]
    whole = found(cost, 4, schedule="1f1b")
    assert [stage.load for stage in whole.stage_graph.stages] == [1.0, 1.0]
    timed = schedule_choice.scheduled(whole, cost, "zb-h1")[0]
    assert [stage.load for stage in timed.stages] == [0.5, 1.0]
