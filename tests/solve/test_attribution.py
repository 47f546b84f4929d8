"""Explanations of steps that can be checked by eye, and of any."""

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings

import anabranch
from anabranch.errors import InvalidPlanError
from anabranch.plans.check import check
from anabranch.plans.stages import Stage, StageGraph
from anabranch.profile.profile import UpdateCost
from anabranch.simulator.critical_path import Cause
from anabranch.solve import explain, simulate
from tests.simulator.helpers import chain, cluster, cost_model, priced_stage_graphs, stage_graph
from tests.solve.helpers import a_plan, asynchronous, on_chain


def explained(graph, cost, schedule="1f1b"):
    """The explanation of a plan with its profile on its cluster."""
    return explain(a_plan(graph, schedule), cost.profile, cost.cluster)


def losses(why):
    """{cause, or cause and stages: seconds}"""
    return {
        " ".join([loss.cause, ">".join(map(str, loss.stages))]).strip(): loss.seconds
        for loss in why.losses
    }


def test_warm_up_drain_and_imbalance():
    """The second device computes most; it waits for the first F and for the last B of stage 0.

    device 0   F0 F1  .  .  . B0  .  .  . B1        works 4 s, the mean is 6
    device 1    . F0 F0 B0 B0 F1 F1 B1 B1  .        works 8 s
    """
    cost = cost_model(chain(2), [1, 2], [1, 2], cluster(2))
    why = explained(stage_graph(chain(2), [(0,), (1,)], 2), cost)
    assert why.step_s == 10.0
    assert why.device == 1
    assert losses(why) == {"work": 6.0, "imbalance": 2.0, "warm_up 0": 1.0, "drain 0": 1.0}


def test_messages_name_their_edge():
    """Stage 1 gets its input 1 s later than it is made, and stage 0 its gradient."""
    cost = cost_model(chain(2), [1, 2], [1, 2], cluster(2, bandwidth=1.0), value_bytes=1)
    why = explained(stage_graph(chain(2), [(0,), (1,)], 1), cost)
    assert losses(why) == {
        "work": 3.0,
        "imbalance": 1.0,
        "warm_up 0": 1.0,
        "message 0>1": 1.0,
        "drain 0": 1.0,
        "message 1>0": 1.0,
    }
    assert why.relaxations[0].change == "fast_links"
    assert why.saves(why.relaxations[0]) == pytest.approx(2 / 8)


def test_data_parallelism_is_said_plainly():
    """Of 6 s of all-reduce after 3 s of compute nothing is hidden: one operator, whose gradient is
    final at the end of its backward.
    """
    cost = cost_model((), [1], [2], cluster(2, bandwidth=1.0), parameter_bytes=6)
    why = explained(stage_graph((), [(0, 1)], 2, [2]), cost)
    assert losses(why) == {"work": 3.0, "all_reduce 0": 6.0}
    assert why.relaxations[0].change == "fast_links"
    assert why.too_few_samples == 1
    said = " ".join(why.summary().split())
    assert said.endswith(why.verdict)
    assert "data parallelism is best here: the last backward hides 0% of the all-reduce" in said
    assert "have to lose less than 66.7% of its step" in said


def test_its_own_update_is_not_that_of_others():
    """Each parameter takes 1 s to update: device 0 has one of them, device 1 has two, and both
    begin when all have agreed.
    """
    cost = cost_model(chain(3), [3, 1, 1], [3, 1, 1], cluster(2), parameter_bytes=1)
    profile = replace(cost.profile, update=UpdateCost(0.0, 1.0, 0.0))
    stages = (Stage(("op0",), (0,), 1), Stage(("op1", "op2"), (1,), 1))
    graph = StageGraph(stages, ((0, 1),), 1)
    why = losses(explained(graph, replace(cost, profile=profile)))
    assert (why["update 0"], why["other_updates 1"]) == (1.0, 1.0)


def test_devices_without_a_stage_are_a_loss():
    """One device of four works: a quarter of its time would do."""
    why = explained(stage_graph((), [(0,)], 4), cost_model((), [1], [2], cluster(4)))
    assert losses(why) == {"work": 3.0, "idle_devices": 9.0}


def test_recompute_and_smaller_slices():
    """The forward is run again; on top, slices of one sample take as long as those of two."""
    from anabranch.profile.profile import OpCost

    cost = cost_model((), [1], [2], cluster(1))
    measured = replace(
        cost.profile,
        samples=(1, 2),
        costs=(OpCost((1.0, 1.0), (2.0, 2.0), 0),),
        proportional=False,
    )
    graph = stage_graph((), [(0,)], 4)
    again = replace(graph, stages=tuple(replace(s, recompute=True) for s in graph.stages))
    why = explain(a_plan(again), measured, cost.cluster)
    assert losses(why) == {"work": 6.0, "recompute": 4.0, "small_slices": 6.0}


def test_another_schedule_is_explained_as_it_is_simulated():
    """GPipe's step instead of the plan's."""
    cost = on_chain(3)
    plan = a_plan(stage_graph(chain(3), [(0,), (1,), (2,)], 4))
    why = anabranch.explain(plan, cost.profile, cost.cluster, schedule="gpipe")
    assert why.step_s == simulate(plan, cost.profile, cost.cluster, schedule="gpipe").step_s


def test_a_plan_that_does_not_suit_is_refused():
    """As by ``simulate``."""
    cost = on_chain(2)
    plan = a_plan(stage_graph(chain(3), [(0,), (1,), (2,)], 4))
    with pytest.raises(InvalidPlanError):
        explain(plan, cost.profile, cost.cluster)


def test_an_asynchronous_plan_has_no_step():
    """It is said so."""
    cost = on_chain(2)
    with pytest.raises(ValueError, match="synchronous"):
        explain(asynchronous(cost, 2), cost.profile, cost.cluster)


@settings(max_examples=25)
@given(priced_stage_graphs())
def test_the_parts_of_any_step_add_up(drawn):
    """Whatever the stages and the machines, and the text fits 80 columns and a screen."""
    graph, cost, schedule = drawn
    assume(not check(graph, cost, shared=True, idle=True))
    plan = a_plan(graph, schedule)
    why = explain(plan, cost.profile, cost.cluster)
    assert why.step_s == simulate(plan, cost.profile, cost.cluster).step_s
    assert sum(loss.seconds for loss in why.losses) == pytest.approx(why.step_s)
    waits = {*map(str, Cause), "warm_up", "drain", "other_stages", "imbalance"}
    assert all(loss.seconds >= 0 for loss in why.losses if loss.cause in waits)
    lines = why.summary().splitlines()
    assert len(lines) <= 34
    assert max(map(len, lines)) <= 80
