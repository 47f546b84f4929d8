"""Explanations of steps that can be checked by eye, and of any."""

import pytest
from hypothesis import assume, given

import anabranch
from anabranch.errors import InvalidPlanError
from anabranch.plans.check import check
from anabranch.solve import Explanation, explain, simulate
from anabranch.solve.explanation.explanation import shorten
from tests.simulator.helpers import chain, cluster, cost_model, priced_stage_graphs, stage_graph
from tests.solve.helpers import a_plan, asynchronous, on_chain


def explained(graph, cost, schedule="1f1b") -> Explanation:
    """The explanation of a plan with its profile on its cluster."""
    return explain(a_plan(graph, schedule), cost.profile, cost.cluster)


def losses(why) -> dict[str, float]:
    """{cause and stages: seconds}"""
    return {
        " ".join([loss.cause, ">".join(map(str, loss.stages))]).strip(): loss.seconds
        for loss in why.losses
    }


def test_parts_are_those_of_the_critical_path():
    """Stage 0 computes first and last, stage 1 in between without a pause.

    device 0   F0 F1  .  .  . B0  .  .  . B1
    device 1    . F0 F0 B0 B0 F1 F1 B1 B1  .
    """
    cost = cost_model(chain(2), [1, 2], [1, 2], cluster(2))
    why = explained(stage_graph(chain(2), [(0,), (1,)], 2), cost)
    assert why.step_s == 10.0
    assert why.device == 1
    assert losses(why) == {"compute 1": 8.0, "compute 0": 2.0}


def test_messages_name_their_edge():
    """Stage 1 gets its input 1 s later than it is made, and stage 0 its gradient."""
    cost = cost_model(chain(2), [1, 2], [1, 2], cluster(2, bandwidth=1.0), value_bytes=1)
    why = explained(stage_graph(chain(2), [(0,), (1,)], 1), cost)
    assert losses(why) == {
        "compute 1": 4.0,
        "compute 0": 2.0,
        "message 0>1": 1.0,
        "message 1>0": 1.0,
    }
    assert why.what_ifs[0].change == "fast_links"
    assert why.saves(why.what_ifs[0]) == pytest.approx(2 / 8)


def test_a_pipeline_of_two_stages_in_words():
    """Every part has its line; an edge has the names of its operators."""
    cost = cost_model(chain(2), [1, 2], [1, 2], cluster(2, bandwidth=1.0), value_bytes=1)
    graph = stage_graph(chain(2), [(0,), (1,)], 1)
    assert explained(graph, cost).summary().splitlines() == [
        "why this plan: no step can be shorter than",
        "  work                          3000.00 ms  over 2 devices",
        "  largest operator              4000.00 ms  op1, over 1",
        "  longest path, there and back  5000.00 ms  of 1 sample",
        "messages and all-reduces alone take at least",
        "  this plan, by busiest link    1000.00 ms  out of device 0",
        "the critical path of its step is",
        "  stage 1 computes              4000.00 ms  50.0%  op1",
        "  stage 0 computes              2000.00 ms  25.0%  op0",
        "  edge 1 -> 0                   1000.00 ms  12.5%  op1 -> op0",
        "  edge 0 -> 1                   1000.00 ms  12.5%  op0 -> op1",
        "  together                      8000.00 ms 100.0%",
        "the same plan, with one thing of machine or model changed, would save",
        "  links infinitely fast                     25.0%",
    ]


def test_data_parallelism_is_said_plainly():
    """Of 6 s of all-reduce after 3 s of compute nothing is hidden: one operator, whose gradient is
    final at the end of its backward.
    """
    cost = cost_model((), [1], [2], cluster(2, bandwidth=1.0), parameter_bytes=6)
    why = explained(stage_graph((), [(0, 1)], 2, [2]), cost)
    assert losses(why) == {"compute 0": 3.0, "all_reduce 0": 6.0}
    assert why.what_ifs[0].change == "fast_links"
    said = " ".join(why.summary().split())
    assert said.endswith(why.verdict)
    assert "data parallelism is best here: the last backward hides 0% of the all-reduce" in said
    assert "have to lose less than 66.7% of its step" in said


def test_a_plan_that_waits_for_no_machine():
    """One device alone: no link, no balance, no memory would change its step."""
    why = explained(stage_graph((), [(0,)], 2), cost_model((), [1], [2], cluster(1)))
    assert why.summary().splitlines()[-2:] == [
        "  together                      6000.00 ms 100.0%",
        "no single change of links, updates, memory or balance would save 0.1% of it",
    ]


def test_data_parallelism_that_cannot_be_faster():
    """100 bytes of weights at 1 byte/s take longer over both devices than the whole step."""
    cost = cost_model(chain(2), [1, 1], [1, 1], cluster(2, bandwidth=1.0), parameter_bytes=100)
    why = explained(stage_graph(chain(2), [(0,), (1,)], 2), cost)
    assert why.verdict == "data parallelism cannot be faster: its all-reduce alone takes longer"


def test_an_operator_keeps_both_ends_of_its_name():
    """The first part says where it is, the last what it is."""
    assert shorten("encoder.0.layers.1.attention", 20) == "encoder.0..attention"
    assert shorten("attention", 20) == "attention"


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


@given(priced_stage_graphs())
def test_the_parts_of_any_step_add_up(drawn):
    """Whatever the stages and the machines, and the text fits 80 columns and a screen."""
    graph, cost, schedule = drawn
    assume(not check(graph, cost, shared=True, idle=True))
    plan = a_plan(graph, schedule)
    why = explain(plan, cost.profile, cost.cluster)
    assert why.step_s == simulate(plan, cost.profile, cost.cluster).step_s
    assert sum(loss.seconds for loss in why.losses) == pytest.approx(why.step_s)
    assert all(loss.seconds > 0 for loss in why.losses)
    lines = why.summary().splitlines()
    assert len(lines) <= 34
    assert max(map(len, lines)) <= 80
