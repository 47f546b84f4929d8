"""A search goes on from its best plan, and only a shorter one takes its place."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import pytest

from anabranch.planner.base import RunOptions
from anabranch.plans.stages import Stage, StageGraph
from anabranch.profile.profile import UpdateCost
from anabranch.solve import contest
from anabranch.solve.contest import Contest
from anabranch.solve.schedule_choice import AUTO
from anabranch.solve.settings import SearchBudget
from tests.simulator.helpers import cluster, cost_model
from tests.solve.helpers import Scripted, found, two_stages, with_size


@dataclass(frozen=True)
class Rounds(Scripted):
    """Proposes micro-batches of one size, then of others in each round; in a row, of ``row``.

    Attributes:
        asked: sizes of the best plan at the beginning of each round.
    """

    graph: StageGraph
    sizes: list[int]
    row: int = 0
    shape: str = "graph"
    asked: list[int] = field(default_factory=list)

    def __iter__(self) -> Iterator[StageGraph]:
        yield with_size(self.graph, 4 if self.shape == "graph" else self.row)

    def again(
        self, best: StageGraph, runs: RunOptions, choice: RunOptions
    ) -> list[tuple[StageGraph, RunOptions]]:
        self.asked.append(best.stages[0].microbatch_size)
        return [(with_size(self.graph, self.sizes.pop(0)), runs)] if self.sizes else []

    def is_misled(self, graph: StageGraph, runs: RunOptions, seconds: float) -> bool:
        return self.row > 0

    def origin(self, graph: StageGraph) -> str:
        return f"in a {self.shape}"


def size_of(plan) -> int:
    return plan.stage_graph.stages[0].microbatch_size


def test_only_a_shorter_plan_takes_the_place_of_the_best(propose):
    """8 samples are slower than 4, 2 are quicker; each round begins with the best until then."""
    cost, graph = two_stages(8)
    asked: list[int] = []
    propose(planner=lambda: Rounds(graph, [8, 2, 8], asked=asked))
    assert size_of(found(cost, 8)) == 2
    assert asked == [4, 4, 2, 2]


def test_without_improvement_there_are_no_rounds(propose):
    cost, graph = two_stages(8)
    asked: list[int] = []
    propose(planner=lambda: Rounds(graph, [2], asked=asked))
    assert size_of(found(cost, 8, improve=False)) == 4
    assert asked == []


@pytest.mark.parametrize(("row", "size", "shape"), [(1, 1, "chain"), (8, 4, "graph")])
def test_a_search_that_is_misled_looks_at_rows_as_well(propose, row, size, shape):
    """And takes the better of both plans."""
    cost, graph = two_stages(8)
    propose(planner=lambda: Rounds(graph, [], row=row))
    plan = found(cost, 8)
    assert size_of(plan) == size
    assert f"in a {shape}" in plan.notes


def test_the_best_plan_is_tried_with_shared_state_whatever_a_search_expects():
    """A second for each of 8 bytes to update, and a search that thinks nothing of shared state."""
    cost = cost_model((), [1.0], [1.0], cluster(2), parameter_bytes=8)
    cost = replace(cost, profile=replace(cost.profile, update=UpdateCost(0, 0, 1.0)))
    graph = StageGraph((Stage(("op0",), (0, 1), 2),), (), 8)
    contest = Contest(cost, AUTO, Rounds(graph, []), SearchBudget(), may_share=True)
    contest.judge.consider([graph])
    contest.share()
    assert contest.cost.shard_optimizer


def test_where_state_is_shared_in_any_case_backwards_are_split():
    """Nothing fits without, so nothing was judged without."""
    cost = cost_model((), [1.0], [1.0], cluster(2), parameter_bytes=8)
    cost = replace(cost, shard_optimizer=True)
    graph = StageGraph((Stage(("op0",), (0, 1), 2),), (), 8)
    contest = Contest(cost, AUTO, Rounds(graph, []), SearchBudget(), may_share=False)
    contest.judge.consider([graph])
    contest.split()
    assert contest.best_s < float("inf")


def test_what_is_proposed_with_split_backwards_is_not_judged_without():
    """Two stages: micro-batches of 2 samples, which are quicker, are proposed with split backwards
    alone; whoever proposes them so expects more of that.
    """
    cost, graph = two_stages(8)

    class Split(Rounds):
        def again(self, best, runs, choice):
            return [
                (graph, RunOptions(split=True)) for graph, _ in super().again(best, runs, choice)
            ]

    contest = Contest(cost, AUTO, Split(graph, [2]), SearchBudget(), may_share=False)
    contest.judge.consider([with_size(graph, 4)])
    contest.search_on()
    assert with_size(graph, 2) not in contest.judge.seconds()


def test_rows_are_tried_with_shared_state_unless_far_behind_without(monkeypatch):
    """Of rows with replicas: the limit is 10 s, and 1.2 times that is far. What does not fit
    without shared state may fit with it.
    """
    cost = cost_model(((0, 1),), [1.0, 1.0], [1.0, 1.0], cluster(4))
    near, far, unfit = graphs = [
        StageGraph((Stage(("op0",), (0, 1), n), Stage(("op1",), (2, 3), n)), ((0, 1),), 8)
        for n in (2, 4, 8)
    ]
    asked: list[tuple[bool, list[StageGraph]]] = []

    def best_loop(cost, graphs, *rest):
        asked.append((cost.shard_optimizer, [*graphs]))
        return None, {near: 11.9, far: 12.1, unfit: math.inf}

    monkeypatch.setattr(contest, "best_loop", best_loop)
    Contest(cost, AUTO, None, SearchBudget(), may_share=True)._judge_loops(graphs, 10.0)
    assert asked == [(False, graphs), (True, [near, unfit])]
