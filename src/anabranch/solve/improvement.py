"""Improvement of the best plan: what lies near it is judged, as long as it gets better."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from anabranch.plans.stages import StageGraph
from anabranch.simulator.judge import Judge


@dataclass(frozen=True, slots=True)
class SearchBudget:
    """Limits of the simulation in a search, in micro-batches times devices.

    On 1,024 devices a simulation takes 5,000 to 30,000 of them and some tenths of a second. With
    half the budgets candle-uno with 32,768 samples on 256 devices ends up to a fifth slower, by
    seed, and a search takes a twentieth less time.

    Attributes:
        simulation: to judge proposals, those with fewest first. Only plans for many hundred devices
            come near it.
        likely: of that, to judge those that a search thinks best, in its order, before all others:
            with all of it, planners were ahead of the search that began with their plans.
        enough: likewise, to see while proposals come whether one is short enough to end the search.
        improvement: to improve on the best of them.
        patience: rounds of that without success until it ends; each sees other neighbours.
    """

    simulation: int = 150_000
    likely: int = 50_000
    enough: int = 10_000
    improvement: int = 150_000
    patience: int = 2


def improve(
    judge: Judge, near: Callable[[StageGraph], Iterable[StageGraph]], budget: SearchBudget
) -> None:
    """Judge what lies near the best plan until that finds nothing better several times in a row."""
    allowed, failures = judge.simulated + budget.improvement, 0
    while judge.best is not None and failures < budget.patience and judge.simulated < allowed:
        better = judge.consider(near(judge.best.proposal), allowed)
        failures = 0 if better else failures + 1
