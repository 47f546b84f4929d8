"""The plan as a run executes it: whose policy, reason, counts and figures are told."""

from dataclasses import replace

import pytest

from anabranch.cli.training.preflight import executed_plan
from anabranch.errors import InvalidPlanError
from anabranch.plans.plan import Plan, Prediction
from anabranch.plans.stages import Stage, StageGraph
from anabranch.solve import synchronous
from tests.cli.models import towers

STAGES = (
    Stage(("left.0", "left.2"), (0,), 8, in_flight=2),
    Stage(("right.0", "right.2"), (1,), 8, in_flight=2),
    Stage(("head",), (2,), 8, in_flight=1),
)
ASYNC = Plan(
    StageGraph(STAGES, ((0, 2), (1, 2)), 8),
    schedule="1f1b",
    planner="graphpipe",
    model="towers",
    cluster="local:3",
    profile="measured",
    search_s=0.0,
    simulate_s=0.0,
    predicted=Prediction(0.5, 0.1, 0.0, (7, 7, 7)),
    notes=("policy stash: somebody said so", "links are slow"),
    mode="async",
    policy="stash",
)
ONE_EACH = tuple(replace(stage, in_flight=1) for stage in STAGES)
SYNC = replace(
    ASYNC, stage_graph=replace(ASYNC.stage_graph, stages=ONE_EACH), mode="sync", policy="", notes=()
)


def held(plan: Plan) -> list[int]:
    """In flight, by stage."""
    return [stage.in_flight for stage in plan.stage_graph.stages]


@pytest.mark.parametrize("policy", [None, "stash"])
def test_a_run_as_planned_is_the_plan(policy):
    """Nothing is to be said in another way."""
    assert executed_plan(ASYNC, towers(), policy, is_async=True) is ASYNC
    assert executed_plan(SYNC, towers(), is_async=False) is SYNC


def test_another_policy_has_no_figures_and_not_the_old_reason():
    """What is not about the policy stays."""
    text = executed_plan(ASYNC, towers(), "2bw", is_async=True).summary()
    assert "asynchronous 1f1b, 2bw" in text
    assert "not predicted" in text
    assert "stash" not in text
    assert "links are slow" in text


def test_without_a_flush_no_state_is_shared():
    """Though a plan with one says so, nor are gradients of tables sparse."""
    planned = replace(SYNC, shard_optimizer=True, sparse_embeddings=True)
    run = executed_plan(planned, towers(), "stash", is_async=True)
    assert (run.mode, run.shard_optimizer, run.sparse_embeddings) == ("async", False, False)


def test_a_policy_that_is_chosen_comes_with_its_reason():
    """Over a plan of either mode; the reason is that of the pipeline."""
    for plan in (ASYNC, SYNC):
        shown = executed_plan(plan, towers(), "auto", is_async=True)
        assert (shown.policy, shown.predicted) == ("pipeoptim", None)
        assert shown.notes[0].startswith("policy pipeoptim: at depth 2")
        assert held(shown) == [2, 2, 1]


def test_with_a_flush_nothing_is_left_of_the_policy():
    """One mini-batch is all that a step has in flight."""
    shown = executed_plan(ASYNC, towers(), is_async=False)
    assert "3 devices, 1f1b, batch 8" in shown.summary()
    assert (shown.policy, shown.notes, shown.predicted) == ("", ("links are slow",), None)
    assert held(shown) == [1, 1, 1]


def test_with_a_flush_stages_warm_up_as_the_schedule_of_the_plan_says():
    """The one of two micro-batches per hop too, for a run as for ``simulate --mode sync``."""
    deep = replace(
        ASYNC, schedule="1f1b-deep", stage_graph=replace(ASYNC.stage_graph, batch_size=64)
    )
    assert held(executed_plan(deep, towers(), is_async=False)) == [3, 3, 1]
    assert held(synchronous(deep)) == [3, 3, 1]


def test_replicas_in_turn_were_not_predicted():
    """Where there are replicas; without, the prediction holds."""
    assert executed_plan(ASYNC, towers(), is_async=True, round_robin=True) is ASYNC
    first = replace(STAGES[0], devices=(0, 3))
    graph = replace(ASYNC.stage_graph, stages=(first, *STAGES[1:]))
    shown = executed_plan(
        replace(ASYNC, stage_graph=graph), towers(), is_async=True, round_robin=True
    )
    assert shown.predicted is None
    assert "replicas of a stage take mini-batches in turn" in shown.summary()


def test_what_cannot_run_is_refused_before_it_is_shown():
    """A plan for gpipe has no order without a flush."""
    with pytest.raises(InvalidPlanError, match="gpipe"):
        executed_plan(replace(SYNC, schedule="gpipe"), towers(), is_async=True)


def test_the_same_choice_for_another_reason_was_not_predicted():
    """The plan was made for an optimizer whose rule takes fewer copies, say."""
    planned = replace(ASYNC, policy="pipeoptim", notes=("policy pipeoptim: by SGD's own rule",))
    shown = executed_plan(planned, towers(), "auto", is_async=True)
    assert "SGD" not in shown.summary()
    assert shown.notes[0].startswith("policy pipeoptim: ")
    assert shown.predicted is None
    again = replace(planned, notes=shown.notes)
    assert executed_plan(again, towers(), "auto", is_async=True) is again
