"""Which proposal wins without a flush, which are not simulated, and why there is none."""

from dataclasses import replace

import pytest

from anabranch.errors import InfeasiblePlanError
from anabranch.plans.stages import Stage, StageGraph
from anabranch.simulator.judge import Judge
from anabranch.simulator.objective import ShortestPeriod, ShortestStep
from anabranch.weights import policy_named
from tests.simulator.helpers import chain, cluster, cost_model, stage_graph


def in_two(cost, cut: int) -> StageGraph:
    """The first ``cut`` operators in one stage, the others in the next."""
    names = [op.name for op in cost.graph.ops]
    stages = Stage(tuple(names[:cut]), (0,), 1), Stage(tuple(names[cut:]), (1,), 1)
    return StageGraph(stages, ((0, 1),), 1)


@pytest.fixture
def cost():
    """Six equal operators of 1 + 1 s in a row, 100 bytes of weights each, on two devices."""
    return cost_model(chain(6), [1.0] * 6, [1.0] * 6, cluster(2), parameter_bytes=100)


def judge_of(cost, policy: str = "stash") -> Judge:
    """For mini-batches of one sample."""
    return Judge(ShortestPeriod(cost, policy_named(policy), 1))


def test_the_shortest_period_wins(cost):
    """Cuts of 1+5, 3+3 and 2+4 operators: 10, 6 and 8 s."""
    judge = judge_of(cost)
    assert judge.consider([in_two(cost, cut) for cut in (1, 3, 2)])
    best = judge.winner("test")
    assert best.proposal == in_two(cost, 3)
    assert judge.best_s == pytest.approx(6.0)
    assert best.versions == (2, 1)


def test_each_proposal_is_judged_once(cost):
    """What was seen before, in whatever length of stream, costs nothing and changes nothing."""
    judge = judge_of(cost)
    judge.consider([in_two(cost, 3)])
    simulated = judge.simulated
    assert not judge.consider([in_two(cost, 3), replace(in_two(cost, 3), batch_size=64)])
    assert judge.simulated == simulated


def test_what_cannot_win_is_not_simulated(cost):
    """A cut whose slowest stage alone is slower than the best period."""
    judge = judge_of(cost)
    judge.consider([in_two(cost, 3)])
    simulated = judge.simulated
    assert not judge.consider([in_two(cost, 1)])
    assert judge.simulated == simulated


def test_likely_ones_come_first(cost):
    """By their bounds: after 3+3 operators neither 2+4 nor 1+5 is simulated."""
    judge, alone = judge_of(cost), judge_of(cost)
    judge.consider([in_two(cost, cut) for cut in (1, 2, 3)])
    alone.consider([in_two(cost, 3)])
    assert judge.simulated == alone.simulated


def test_a_limit_that_none_comes_to():
    """12 s of compute are within 13 s, but messages take 2 s more: two stages fit, and are no
    better than what the limit was taken from.
    """
    machines = cluster(2, bandwidth=100.0)
    cost = cost_model(chain(6), [1.0] * 6, [1.0] * 6, machines, value_bytes=100)
    judge = Judge(ShortestStep(cost, ("1f1b",)))
    judge.best_s = 13.0
    assert not judge.consider([in_two(cost, 3)])
    assert judge.simulated
    assert judge.winner("test").proposal == in_two(cost, 3)


def test_no_simulation_beyond_what_is_allowed(cost):
    """The first is judged, the better second is not any more."""
    judge = judge_of(cost)
    judge.consider([in_two(cost, 2), in_two(cost, 3)], allowed=1, in_order=True)
    assert judge.winner("test").proposal == in_two(cost, 2)


def test_equal_means_nearly_equal():
    """A chain that is a two-thousandth faster than branches is not worth its staleness."""
    edges = ((0, 2), (1, 2))
    model = cost_model(edges, [1.0] * 3, [2.0] * 3, cluster(3, bandwidth=1e5), value_bytes=100)
    beside = stage_graph(edges, [(0,), (1,), (2,)], 1)
    row = replace(beside, edges=((0, 1), (0, 2), (1, 2)))
    judge = judge_of(model)
    judge.consider([row])
    in_a_row_s = judge.best_s
    judge.consider([beside])
    best = judge.winner("test")
    assert best.graph.depth == 2
    assert judge.best_s == pytest.approx(in_a_row_s, rel=1e-12)


def test_versions_count(cost):
    """100 * (n + 3) of one operator's weights in n versions, and a gradient before it is added."""
    tight = replace(cost, cluster=replace(cost.cluster, memory_bytes=1500))
    judge = judge_of(tight)
    judge.consider([in_two(cost, 3)])  # stage 0: 300 * (2 + 3) + 100
    assert judge.too_big == [1600.0]
    with pytest.raises(InfeasiblePlanError, match="the weight versions of policy stash"):
        judge.winner("test")
    naive = judge_of(tight, "naive")
    naive.consider([in_two(cost, 3)])  # 300 * (1 + 3) + 100
    assert naive.winner("test").peak_bytes == 1300


def test_nothing_suits_or_nothing_was_proposed(cost):
    """Other reasons than memory."""
    grouped = in_two(cost, 3)
    grouped = replace(grouped, stages=tuple(replace(s, k=2) for s in grouped.stages))
    judge = judge_of(cost)
    judge.consider([grouped])
    with pytest.raises(InfeasiblePlanError, match=r"suits policy stash: .* groups of 2"):
        judge.winner("test")
    with pytest.raises(InfeasiblePlanError, match="proposes nothing"):
        judge_of(cost).winner("test")
