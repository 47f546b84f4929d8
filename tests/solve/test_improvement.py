"""Improvement on the best proposals."""

from dataclasses import dataclass

import pytest

from anabranch.cost import CostModel
from anabranch.plans.stages import StageGraph
from anabranch.solve import (
    search,
)
from anabranch.solve.improvement import SearchBudget
from tests.solve.helpers import found, two_stages, with_size


@dataclass(frozen=True)
class Improving:
    """Proposes large micro-batches, and half of what is best when asked for more."""

    graph: StageGraph

    def __call__(self, cost: CostModel, *, batch_size: int, microbatch_size: int | None = None):
        yield with_size(self.graph, 8)

    def neighbourhood(self, cost: CostModel, batch_size: int, microbatch_size: int | None):
        def near(graph: StageGraph) -> list[StageGraph]:
            return [with_size(self.graph, max(1, graph.stages[0].microbatch_size // 2))]

        return near


def test_what_lies_near_the_best_is_tried_until_nothing_is_better(propose):
    """8, then 4, 2 and 1 samples."""
    cost, graph = two_stages(8)
    propose(planner=lambda: Improving(graph))
    assert found(cost, 8).stage_graph.stages[0].microbatch_size == 1


def test_improvement_can_be_left_out(propose):
    """Then the best proposal is the plan, as it was proposed."""
    cost, graph = two_stages(8)
    propose(planner=lambda: Improving(graph))
    best = found(cost, 8, improve=False)
    assert best.stage_graph.stages[0].microbatch_size == 8
    assert best.improve_s == pytest.approx(0, abs=1e-3)


@dataclass(frozen=True)
class Detour:
    """Proposes a good plan that nothing lies near, and a worse one on the way to the best."""

    graph: StageGraph

    def __call__(self, cost: CostModel, *, batch_size: int, microbatch_size: int | None = None):
        yield with_size(self.graph, 2)
        yield with_size(self.graph, 8)

    def neighbourhood(self, cost: CostModel, batch_size: int, microbatch_size: int | None):
        nexts = {8: 4, 4: 1}

        def near(graph: StageGraph) -> list[StageGraph]:
            size = graph.stages[0].microbatch_size
            return [with_size(self.graph, nexts[size])] if size in nexts else []

        return near


def test_a_proposal_is_followed_also_while_it_is_behind(propose, monkeypatch):
    """8 samples, then 4, which is still behind 2, then 1, which is best."""
    cost, graph = two_stages(8)
    propose(planner=lambda: Detour(graph))
    assert found(cost, 8).stage_graph.stages[0].microbatch_size == 1
    monkeypatch.setattr(search, "BUDGET", SearchBudget(improvement=0))
    assert found(cost, 8).stage_graph.stages[0].microbatch_size == 2
