"""Improvement of the best proposals: what lies near them is judged, as long as it gets better."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from anabranch.plans.stages import StageGraph
from anabranch.simulator.judge import Judge

Neighbourhood = Callable[[StageGraph], Iterable[StageGraph]]
"""Stage graph -> others that differ little from it."""


@dataclass(frozen=True, slots=True)
class SearchBudget:
    """Limits of the search. More of anything takes longer and seldom finds a better plan.

    Attributes:
        simulation: micro-batches times devices that may be simulated to judge proposals, those with
            fewest first. Only plans for many hundred devices come near it.
        improvement: likewise, to improve on the best of them.
        starts: proposals unlike the best whose neighbours are tried as well.
        longer: how much longer their steps may be.
        few_operators: in models of so many, ``starts_of_few`` and ``longer_of_few`` count.
        few_devices: on so many, or in such a model, each start is followed also while it is behind
            the best.
    """

    simulation: int = 150_000
    improvement: int = 150_000
    starts: int = 4
    longer: float = 1.15
    few_operators: int = 24
    starts_of_few: int = 12
    longer_of_few: float = 2.0
    few_devices: int = 16


def improve(
    judge: Judge, near: Neighbourhood, budget: SearchBudget, *, operators: int, devices: int
) -> None:
    """Judge what lies near the best plan, as long as it gets better, and near others unlike it."""
    assert judge.best is not None, "there is something to improve"
    few = operators <= budget.few_operators
    apart = few or devices <= budget.few_devices
    count = budget.starts_of_few if few else budget.starts
    allowed = judge.simulated + budget.improvement
    others = _unlike(judge, count, budget.longer_of_few if few else budget.longer)
    _follow(judge, near, judge.best.proposal, allowed)
    for start in others:
        if apart:
            way = judge.alone(start)
            _follow(way, near, start, allowed - judge.simulated)
            judge.join(way)
        else:
            _follow(judge, near, start, allowed)


def _follow(judge: Judge, near: Neighbourhood, here: StageGraph, allowed: float) -> None:
    while judge.consider(near(here), allowed) and judge.best is not None:
        here = judge.best.proposal


def _unlike(judge: Judge, count: int, factor: float) -> list[StageGraph]:
    """Some proposals but for the best, none much longer: the best with each number of stages, and
    then the best of the others.
    """
    assert judge.best is not None, "there is something to improve"
    best = judge.best.proposal
    others = [graph for graph in judge.ranked(factor) if graph != best]
    first = {len(best): best}
    for graph in others:
        first.setdefault(len(graph), graph)
    unlike = list(first.values())[1:]
    return [*unlike, *(graph for graph in others if graph not in unlike)][:count]
