"""Auto as a planner: what it begins with, and what it makes of that."""

from dataclasses import replace
from functools import cache

import pytest

import anabranch
from anabranch.errors import InvalidPlanError
from anabranch.planner import PLANNERS
from anabranch.planner.auto.planner import STARTS, Auto, along_branches
from anabranch.planner.toolkit.problem import Problem
from anabranch.plans.plan import Plan
from anabranch.plans.stages import Stage, StageGraph
from tests.planner import shapes
from tests.planner.helpers import cluster, cost_model

COST = cost_model(shapes.towers("towers", 2, 1, layers=2, top=1), 4, memory=2**34, bandwidth=2e9)
QUICK = {"evaluations": 300}


def hand_made(planner: str = "") -> Plan:
    """Everything in a row of two stages, the first one with three devices."""
    names = [op.name for op in COST.graph.ops]
    stages = (Stage(tuple(names[:-1]), (0, 1, 2), 16), Stage(tuple(names[-1:]), (3,), 16))
    graph = StageGraph(stages, ((0, 1),), 64)
    return Plan(graph, "1f1b", planner, "towers", "", "", 0.0, 0.0, None)


def found(start: Plan | None = None, **options: object) -> Plan:
    return anabranch.plan(
        COST.profile, COST.cluster, 64, planner_options=QUICK | options, start=start
    )


@cache
def by_default() -> Plan:
    """What is found without a start, once for all tests."""
    return found()


def test_what_lies_near_a_plan_with_shared_devices_says_where_it_began():
    """Nothing was proposed before that a note could name."""
    graph = hand_made().stage_graph
    first, last = (replace(stage, devices=(0, 1, 2, 3)) for stage in graph.stages)
    search = Auto()(COST, batch_size=64, start=replace(graph, stages=(first, last)))
    near = search.near_loops(replace(graph, stages=(first, last)))
    assert {search.origin(g) for g in near} == {
        "found from the plan of the user by 1 change to stages or devices"
    }


@pytest.mark.parametrize("name", [*STARTS, "dapple"])
def test_never_behind_its_starts(name):
    """Their proposals are among its own."""
    starts = list(PLANNERS[name]()(COST, batch_size=64))
    assert set(starts) <= set(Auto(evaluations=0)(COST, batch_size=64))


def test_a_start_has_a_stage_for_each_branch_and_for_what_is_between():
    """On all devices; there is none in a row, nor on fewer devices than stages."""
    towers = shapes.towers("towers", 2, 1, layers=2, top=1)
    problem = Problem(cost_model(towers, 8, memory=2**34), 64)
    graph = along_branches(problem)
    assert graph is not None
    assert [stage.operators for stage in graph.stages] == [
        ("dense0.0", "dense0.1"),
        ("dense1.0", "dense1.1"),
        ("sparse0",),
        ("concat", "top0", "loss"),
    ]
    assert graph.edges == ((0, 3), (1, 3), (2, 3))
    assert sum(stage.replicas for stage in graph.stages) == 8
    assert graph in set(Auto(evaluations=0)(problem.cost, batch_size=64))
    assert graph not in set(Auto(evaluations=0, shape="chain")(problem.cost, batch_size=64))
    assert along_branches(Problem(cost_model(towers, 2, memory=2**34), 64)) is None
    row = shapes.towers("row", 1, 0)
    assert along_branches(Problem(cost_model(row, 8, memory=2**34), 64)) is None


@pytest.mark.parametrize(("branches", "is_asked"), [(1, False), (2, True)])
def test_graphpipe_is_not_asked_where_the_model_is_a_row(branches, is_asked, monkeypatch):
    """Its plans are those of a row there, and it takes longest of all starts."""
    asked, propose = [], Auto._proposed

    def recorded(planner, name, problem):
        asked.append(name)
        yield from propose(planner, name, problem)

    monkeypatch.setattr(Auto, "_proposed", recorded)
    towers = shapes.towers("towers", branches, 1, layers=2, top=1)
    list(Auto(evaluations=0)(cost_model(towers, 4, memory=2**34), batch_size=64))
    assert "sequential" in asked
    assert ("graphpipe" in asked) == is_asked


def test_chains_only():
    """Every proposal is a chain, and none is quicker than the best graph by much."""
    assert all(graph.shape == "chain" for graph in PLANNERS["chain"]()(COST, batch_size=64))
    chains, graphs = found(shape="chain"), by_default()
    assert chains.stage_graph.shape == "chain"
    assert graphs.figures.step_s <= chains.figures.step_s * 1.01


def test_a_chain_does_not_begin_with_a_graph():
    """The two towers side by side are none."""
    proposals = PLANNERS["graphpipe"]()(COST, batch_size=64)
    graph = next(graph for graph in proposals if graph.shape == "graph")
    with pytest.raises(InvalidPlanError, match="no chain"):
        Auto(shape="chain")(COST, batch_size=64, start=graph)


def test_the_default_says_where_its_plan_comes_from():
    """The last note: moves and the planner that it began with."""
    plan = by_default()
    assert plan.planner == "auto"
    assert " from the plan of the " in plan.notes[-1]
    assert any(name in plan.notes[-1] for name in (*STARTS, "dapple"))


def test_the_same_seed_finds_the_same_plan():
    """But for the seconds that it took."""
    first, second = (
        replace(plan, search_s=0, simulate_s=0, improve_s=0) for plan in (by_default(), found())
    )
    assert first == second


def test_a_plan_by_hand_is_improved():
    """Better than it was, and it says what it began with."""
    before = anabranch.simulate(hand_made(), COST.profile, COST.cluster, schedule="auto")
    plan = found(hand_made())
    assert plan.predicted.step_s < before.step_s
    assert "the user" in plan.notes[-1]


def test_a_start_for_another_model_or_planner_is_refused():
    """What is wrong with it, all of it; and only auto begins with a plan."""
    plan = hand_made()
    other = replace(plan.stage_graph.stages[0], operators=("nobody",))
    graph = replace(plan.stage_graph, stages=(other, plan.stage_graph.stages[1]))
    with pytest.raises(InvalidPlanError, match="no operators nobody"):
        found(replace(plan, stage_graph=graph))
    idle = replace(plan.stage_graph.stages[0], devices=(0, 1))
    graph = replace(plan.stage_graph, stages=(idle, plan.stage_graph.stages[1]))
    with pytest.raises(InvalidPlanError, match="1 of 4 devices hold no stage"):
        found(replace(plan, stage_graph=graph))
    with pytest.raises(ValueError, match="this is planner even"):
        anabranch.plan(COST.profile, COST.cluster, 64, planner="even", start=plan)


def test_a_start_with_other_micro_batches_is_refused():
    """Than those asked for."""
    with pytest.raises(ValueError, match="micro-batches of 16 samples"):
        anabranch.plan(COST.profile, COST.cluster, 64, start=hand_made(), microbatch_size=8)


def test_limits_hold_for_what_it_makes():
    """No replicas where none are allowed, no recomputation, one micro-batch size."""
    tight = replace(COST, cluster=cluster(4, memory=2**30, bandwidth=2e9))
    proposals = Auto(max_replicas=1, recompute=False, evaluations=300)(
        tight, batch_size=64, microbatch_size=8
    )
    stages = [stage for graph in proposals for stage in graph.stages]
    assert {stage.replicas for stage in stages} == {1}
    assert not any(stage.recompute for stage in stages)
    assert {stage.microbatch_size for stage in stages} == {8}
