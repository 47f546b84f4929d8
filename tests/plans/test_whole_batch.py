"""Stages that need the whole batch: what is wrong with others, and what proposals become."""

from dataclasses import replace

import pytest

from anabranch.errors import InvalidPlanError
from anabranch.graph.opgraph import Op, OpGraph, Value
from anabranch.plans.stages import Stage, StageGraph
from anabranch.plans.whole_batch import fitted, sliced_batches, with_whole_batches

TOWERS = OpGraph(
    (Op("left"), Op("right"), Op("compare", whole_batch=True), Op("head")),
    (Value(0, (2,), 4), Value(1, (2,), 4), Value(2, (3,), 4)),
)
"""Two towers that are compared across samples, and a head for each sample."""


def test_a_stage_that_slices_the_batch_is_named_with_what_to_change() -> None:
    """Micro-batches or replicas; the towers may have both."""
    towers = Stage(("left", "right"), (0, 1), 2)
    right = StageGraph((towers, Stage(("compare", "head"), (2,), 8)), ((0, 1),), 8)
    assert sliced_batches(right, TOWERS) == []
    small = replace(right, stages=(towers, replace(right.stages[1], microbatch_size=4)))
    (problem,) = sliced_batches(small, TOWERS)
    assert "operator compare in stage 1 computes across samples" in problem
    assert "give its stage a micro-batch of 8 and one replica" in problem
    shared = replace(right, stages=(towers, replace(right.stages[1], devices=(2, 3))))
    assert "on 2 replicas" in sliced_batches(shared, TOWERS)[0]
    assert with_whole_batches(small, TOWERS) == right


def test_replicas_before_the_comparison_stay() -> None:
    """One stage of three replicas becomes two replicas of the towers, and one device that compares;
    a stage behind it keeps its micro-batches.
    """
    proposal = StageGraph(
        (Stage(("left", "right", "compare"), (0, 1, 2), 6), Stage(("head",), (3,), 2)),
        ((0, 1),),
        12,
    )
    found = fitted(proposal, TOWERS)
    assert [s.operators for s in found.stages] == [("left", "right"), ("compare",), ("head",)]
    assert [s.devices for s in found.stages] == [(0, 1), (2,), (3,)]
    assert [s.microbatch_size for s in found.stages] == [6, 12, 2]
    assert found.edges == ((0, 1), (1, 2))
    assert sliced_batches(found, TOWERS) == []


def test_other_models_are_left_alone() -> None:
    """Also a proposal for one that compares, if nothing is wrong with it."""
    plain = OpGraph((Op("left"), Op("right")), (Value(0, (1,), 4),))
    proposal = StageGraph((Stage(("left", "right"), (0, 1), 4),), (), 8)
    assert fitted(proposal, plain) is proposal


def test_replicas_of_nothing_but_the_comparison_go_to_what_it_reads() -> None:
    """Whose micro-batches have a sample for each; where there is nothing, the proposal is none."""
    stages = (Stage(("left", "right"), (0, 1), 2), Stage(("compare", "head"), (2, 3), 8))
    found = fitted(StageGraph(stages, ((0, 1),), 8), TOWERS)
    assert [s.devices for s in found.stages] == [(0, 1, 2), (3,)]
    assert [s.microbatch_size for s in found.stages] == [3, 8]
    alone = OpGraph((Op("compare", whole_batch=True),), ())
    with pytest.raises(InvalidPlanError, match="cannot share a batch among 2 replicas"):
        fitted(StageGraph((Stage(("compare",), (0, 1), 8),), (), 8), alone)


def test_devices_with_another_stage_are_not_given_away() -> None:
    """Both towers have them already; the comparison keeps one of them."""
    stages = (Stage(("left", "right"), (0, 1), 2), Stage(("compare", "head"), (0, 1), 8))
    found = fitted(StageGraph(stages, ((0, 1),), 8), TOWERS)
    assert [s.devices for s in found.stages] == [(0, 1), (1,)]
    assert [s.microbatch_size for s in found.stages] == [2, 8]


def test_devices_are_not_given_away_for_less_than_a_sample_each() -> None:
    """Three devices for a batch of two samples."""
    stages = (Stage(("left", "right"), (0, 1), 2), Stage(("compare", "head"), (2, 3), 2))
    with pytest.raises(InvalidPlanError, match="would have 3 devices, the batch only 2"):
        fitted(StageGraph(stages, ((0, 1),), 2), TOWERS)
