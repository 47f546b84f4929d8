"""Ways to run a proposal, and what decides between equal times."""

from dataclasses import replace

import pytest

from anabranch.simulator.judge import Judge
from anabranch.simulator.objective import ShortestPeriod, ShortestStep
from anabranch.weights import policy_named
from tests.simulator.helpers import chain, cluster, cost_model, stage_graph

TWO = stage_graph(chain(2), [(0,), (1,)], 8)


@pytest.fixture
def cost():
    """Two equal operators on two devices, 100 bytes of weights each."""
    return cost_model(chain(2), [1.0] * 2, [1.0] * 2, cluster(2), parameter_bytes=100)


def test_a_step_runs_under_each_schedule_and_a_period_under_one(cost):
    """With one version of the weights, or those of the policy; the latter for its own batch."""
    step = ShortestStep(cost, ("1f1b", "gpipe"))
    runs = [
        (schedule, [stage.in_flight for stage in graph.stages], versions)
        for graph, schedule, versions in step.runs(TWO)
    ]
    assert runs == [("1f1b", [2, 1], ()), ("gpipe", [8, 8], ())]
    period = ShortestPeriod(cost, policy_named("stash"), 1)
    (run,) = period.runs(TWO)
    assert (run[0].batch_size, run[1:]) == (1, ("1f1b", (2, 1)))


@pytest.mark.parametrize("is_async", [False, True])
def test_of_equal_times_less_recomputation_wins(cost, is_async):
    """Operators whose forward costs nothing are as quick with recomputation as without."""
    free = replace(
        cost,
        profile=replace(
            cost.profile,
            costs=tuple(replace(op, forward_s=(0.0,)) for op in cost.profile.costs),
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


def test_a_step_is_measured_by_short_ones(cost):
    """A thousand micro-batches take 1001 * 2 s; far fewer are simulated."""
    graph = replace(TWO, batch_size=1000)
    objective = ShortestStep(cost, ("1f1b",))
    judge = Judge(objective)
    judge.consider([graph])
    assert judge.best_s == pytest.approx(2002)
    assert judge.simulated < 200
