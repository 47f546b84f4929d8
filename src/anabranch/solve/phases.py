"""Phases of a search: their seconds, reasons for an early end, and the plan that they give."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

from anabranch.cost import CostModel
from anabranch.errors import BudgetError
from anabranch.graph.opgraph import ModelSize
from anabranch.plans.plan import Plan
from anabranch.plans.stages import StageGraph

Phase = Literal["search_s", "simulate_s", "improve_s"]
"""Phases by the fields of ``Plan`` that have their seconds."""

Stop = KeyboardInterrupt | BudgetError
"""Reasons for the early end of a search: Ctrl-C, or the planner's own budget."""


class Phases:
    """Phases of one search.

    Attributes:
        seconds: seconds of each phase.
        stop: reason for an early end of the search, if it was ended early.
    """

    def __init__(self) -> None:
        self.stop: Stop | None = None
        self.seconds: dict[str, float] = {"search_s": 0.0, "simulate_s": 0.0, "improve_s": 0.0}
        self._outer: Phase | None = None

    @contextmanager
    def timed(self, phase: Phase) -> Iterator[None]:
        """Count the seconds inside for this phase, and not for the phase around it."""
        outer, self._outer = self._outer, phase
        began = time.perf_counter()
        try:
            yield
        finally:
            taken = time.perf_counter() - began
            self.seconds[phase] += taken
            if outer is not None:
                self.seconds[outer] -= taken
            self._outer = outer

    def run(self, phase: Phase, work: Callable[[], object]) -> bool:
        """Do the work of a phase; return False if it was interrupted."""
        with self.timed(phase):
            try:
                work()
            except KeyboardInterrupt as interrupt:
                self.stop = interrupt
                return False
        return True

    def plan(self, cost: CostModel, model: str, **fields: Any) -> Plan:
        """Return the plan of the search for these prices; ``fields`` are its remaining fields."""
        profile = cost.profile
        more: dict[str, Any] = fields | self.seconds
        return Plan(
            model=model or profile.graph.name,
            cluster=cost.cluster.name,
            machines=cost.cluster,
            profile=profile.origin,
            device=profile.device,
            granularity=profile.graph.granularity,
            rewrites=profile.graph.rewrites,
            precision=profile.graph.precision,
            model_size=ModelSize.of(profile.graph),
            interrupted=isinstance(self.stop, KeyboardInterrupt),
            **more,
        )

    def notes(self, count: int) -> list[str]:
        """Return the note on a search that was ended early, after ``count`` proposals."""
        if self.stop is None:
            return []
        return [f"{str(self.stop) or 'interrupted'}: the best of the first {count} proposals"]


def collect(proposals: Iterable[StageGraph]) -> tuple[list[StageGraph], Stop | None]:
    """Collect the proposals of a planner; also return the reason if it ended early."""
    collected: list[StageGraph] = []
    try:
        collected.extend(proposals)
    except (KeyboardInterrupt, BudgetError) as stop:
        if not collected:
            raise
        return collected, stop
    return collected, None


def to_its_end(make: Callable[[], Plan]) -> Plan:
    """Make the plan of a finished search, even after an interrupt; a second one ends it."""
    try:
        return make()
    except KeyboardInterrupt:
        plan = make()
        notes = (*plan.notes, "interrupted when the search was over")
        return replace(plan, notes=notes, interrupted=True)
