"""The benchmark of list schedules: what it calls the shortest is, and lists are near it."""

from collections.abc import Iterator
from itertools import permutations, product

import pytest

from anabranch.plans.stages import Stage, StageGraph
from anabranch.schedule.schedule import Action
from benchmarks.planners.common import profile_of
from benchmarks.schedules import __main__ as schedules
from benchmarks.schedules import loops
from benchmarks.schedules.exact import ListProblem, Pass


def row(stages: int, samples: int) -> StageGraph:
    """Stages in a row, one sample in each micro-batch."""
    chain = tuple((s, s + 1) for s in range(stages - 1))
    return StageGraph(tuple(Stage((f"op{s}",), (s,), 1) for s in range(stages)), chain, samples)


def orders(problem: ListProblem, stage: int) -> Iterator[tuple[Pass, ...]]:
    """Every order of a stage's passes in which none comes before one of the stage that it waits
    for.
    """
    for way in permutations([p for p in problem.lengths if p[0] == stage]):
        if not any(later in problem.waits[p] for i, p in enumerate(way) for later in way[i:]):
            yield way


@pytest.mark.parametrize("seconds", [(1, 1, 1), (1, 3, 2), (3, 1, 2)])
@pytest.mark.parametrize("in_flight", [(1, 1), (2, 1), (2, 2)])
def test_the_shortest_is_that_of_all_orders(seconds, in_flight):
    """Two stages, two micro-batches: every order of the passes of each."""
    problem = ListProblem(row(2, 2), in_flight, [seconds] * 2)
    steps = []
    for ways in product(*(orders(problem, stage) for stage in (0, 1))):
        try:
            steps.append(problem.step_s([[Action(*p) for p in way] for way in ways]))
        except ValueError:  # passes that wait for each other
            continue
    assert problem.shortest(max(steps)) == min(steps)
    assert problem.bound_s <= min(steps)


def test_published_bubbles():
    """A chain of four, eight micro-batches: 3 M + p - 1 with the memory of 1F1B (H1, where the
    first forward and the last update are in the step); 1F1B itself is 6 s longer.
    """
    problem = ListProblem(row(4, 8), [4] * 4, [(1, 1, 1)] * 4)
    assert problem.shortest(33) == 27
    assert not problem.is_possible(26)


def test_lists_are_near_the_shortest():
    """On ten stage graphs of each kind: as short on eight, and never 3 % longer."""
    for kind in schedules.KINDS:
        results = list(schedules.compared(kind, 10, seed=3))
        factors = [result.factor for result in results if result.shortest_s is not None]
        assert len(factors) == 10
        assert sum(factor == 1 for factor in factors) >= 8
        assert 1 <= min(factors) <= max(factors) <= 1.03


def test_the_table_is_shown(monkeypatch, capsys):
    """A line for each kind of stages."""
    monkeypatch.setattr("sys.argv", ["schedules", "--cases", "2", "--verbose"])
    schedules.main()
    shown = capsys.readouterr().out
    assert all(f"| {kind} | " in shown for kind in schedules.KINDS)


def test_plans_with_several_stages_are_beside_those_with_one(monkeypatch):
    """Of a small case, whose step is shorter."""
    monkeypatch.setattr(loops, "profile", lambda name: profile_of(name, 2, layers="3"))
    text = loops.loops((("transformer", "summit:1x2", 2),)).splitlines()
    apart, several = map(float, text[2].split(" | ")[3:5])
    assert several < apart
    assert "stages of 1 replicas" in text[2]
