"""Improvement on the best proposals."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from anabranch.planner.base import PLAIN_RUN, RunOptions
from anabranch.plans.stages import StageGraph
from anabranch.solve import step_search
from anabranch.solve.settings import SearchBudget
from tests.solve.helpers import Scripted, found, two_stages, with_size


@dataclass(frozen=True)
class Halving(Scripted):
    """Proposes large micro-batches; half of what is best is near, at every other try."""

    graph: StageGraph
    asked: list[int]

    def __iter__(self) -> Iterator[StageGraph]:
        yield with_size(self.graph, 8)

    def near(self, graph: StageGraph, runs: RunOptions = PLAIN_RUN) -> list[StageGraph]:
        self.asked.append(graph.stages[0].microbatch_size)
        if len(self.asked) % 2:
            return []
        return [with_size(self.graph, max(1, graph.stages[0].microbatch_size // 2))]

    def promising(
        self, graphs: Iterable[StageGraph], runs: RunOptions, limit: float = math.inf
    ) -> list[StageGraph]:
        return [*graphs]

    def origin(self, graph: StageGraph) -> str:
        return f"with {graph.stages[0].microbatch_size} samples"


def test_what_lies_near_the_best_is_tried_until_nothing_is_better(propose):
    """8, then 4, 2 and 1 samples, each found at the second try; then two tries in vain. The plan
    says where it comes from.
    """
    cost, graph = two_stages(8)
    asked: list[int] = []
    propose(planner=lambda: Halving(graph, asked))
    plan = found(cost, 8)
    assert plan.stage_graph.stages[0].microbatch_size == 1
    assert asked == [8, 8, 4, 4, 2, 2, 1, 1]
    assert plan.notes[-1] == "with 1 samples"


def test_improvement_can_be_left_out(propose):
    """Then the best proposal is the plan, as it was proposed, and nothing near it is asked for."""
    cost, graph = two_stages(8)
    asked: list[int] = []
    propose(planner=lambda: Halving(graph, asked))
    best = found(cost, 8, improve=False)
    assert best.stage_graph.stages[0].microbatch_size == 8
    assert not asked


def test_improvement_has_a_budget(propose, monkeypatch):
    """Nothing is simulated beyond it."""
    cost, graph = two_stages(8)
    propose(planner=lambda: Halving(graph, []))
    monkeypatch.setattr(step_search, "BUDGET", SearchBudget(improvement=0))
    assert found(cost, 8).stage_graph.stages[0].microbatch_size == 8
