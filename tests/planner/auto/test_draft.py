"""Drafts and stage graphs say the same."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.cost import CostModel
from anabranch.errors import InvalidPlanError
from anabranch.planner.auto.draft import Draft, draft_of, stage_graph_of
from anabranch.plans.check import check
from anabranch.plans.stages import Stage, StageGraph
from tests.planner import shapes
from tests.planner.auto.random_drafts import random_draft
from tests.planner.helpers import cost_model, linked_model

TOWERS = shapes.towers("towers", 2, 1, layers=2, top=1)


def ints(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.int32)


def diamond() -> tuple[CostModel, Draft]:
    """op0 -> op1, op2 -> op3, with the branches on devices 1 and 0."""
    cost = linked_model(4, [(0, 1), (0, 2), (1, 3), (2, 3)])
    draft = Draft(
        ints(0, 1, 0, 0), ints(1, 0), (2, 4), (1, 2), (1, 0),
        deep=True, chained=False, sharded=False,
    )  # fmt: skip
    return cost, draft


def test_a_draft_as_stages():
    """What a stage graph has follows: names, devices, and an edge where a value crosses."""
    cost, draft = diamond()
    graph = stage_graph_of(draft._replace(op_stage=ints(0, 1, 0, 1)), cost, 8)
    assert graph == StageGraph(
        (Stage(("op0", "op2"), (1,), 2, recompute=True), Stage(("op1", "op3"), (0,), 4, k=2)),
        ((0, 1),),
        8,
    )


def test_a_group_holds_no_more_micro_batches_than_there_are():
    """With 3 samples micro-batches of 2 and 4 are two and one; a k of 2 is then 2 and 1."""
    cost, draft = diamond()
    graph = stage_graph_of(draft._replace(op_stage=ints(0, 1, 0, 1), k=(2, 2)), cost, 3)
    assert [stage.k for stage in graph.stages] == [2, 1]


def test_a_circle_of_stages_is_none():
    """Stage 0 has both ends of the diamond, stage 1 an operator between them."""
    cost, draft = diamond()
    with pytest.raises(InvalidPlanError, match="stages 0, 1 wait for each other in a circle"):
        stage_graph_of(draft, cost, 8)


def test_numbers_of_stages_say_what_comes_first_in_a_chain():
    """Two operators side by side: chained, the stage with the lower number runs first."""
    cost = linked_model(2, [])
    draft = Draft(
        ints(1, 0), ints(0, 1), (1, 1), (1, 1), (0, 0),
        deep=False, chained=True, sharded=False,
    )  # fmt: skip
    graph = stage_graph_of(draft, cost, 2)
    assert [stage.operators for stage in graph.stages] == [("op1",), ("op0",)]
    assert graph.edges == ((0, 1),)
    assert draft_of(graph, cost).chained


@pytest.mark.parametrize("devices", [1, 6])
@given(seed=st.integers(0, 2**32))
def test_there_and_back_again(devices, seed):
    """Stages made from a draft, and again from the draft of those, are the same, and without a
    circle they are as every plan has to be but for sizes and memory.
    """
    cost = cost_model(TOWERS, devices, memory=2**60)
    draft = random_draft(cost, 8, seed)
    cost = replace(cost, shard_optimizer=draft.sharded)
    graph = stage_graph_of(draft, cost, 8)
    again = draft_of(graph, cost)
    assert stage_graph_of(again, cost, 8) == graph
    assert again.sharded == draft.sharded
    assert not [problem for problem in check(graph, cost) if problem.startswith("C")]
    # Numbers are now in topological order, so nothing changes any more.
    third = draft_of(graph, cost)
    assert all(np.array_equal(a, b) for a, b in zip(again, third, strict=True))


def test_a_device_holds_one_stage():
    """The search moves whole devices; plans by hand may have other ones."""
    cost = linked_model(2, [(0, 1)])
    first, second = Stage(("op0",), (0,), 1), Stage(("op1",), (0,), 1)
    with pytest.raises(InvalidPlanError, match="a device of stage 1 holds another stage as well"):
        draft_of(StageGraph((first, second), ((0, 1),), 2), cost)
    with pytest.raises(InvalidPlanError, match="device 1 of 2 devices holds no stage"):
        draft_of(StageGraph((Stage(("op0", "op1"), (0,), 1),), (), 2), cost)
