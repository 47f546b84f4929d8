"""Searches that are ended early, by Ctrl-C or by their planner's own budget, and what they give."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from anabranch.errors import BudgetError
from anabranch.plans.plan import Plan
from anabranch.plans.stages import StageGraph

Stop = KeyboardInterrupt | BudgetError
"""Reasons for the early end of a search."""


def collect(proposals: Iterable[StageGraph]) -> tuple[list[StageGraph], Stop | None]:
    """Collect the proposals of a planner; also return the reason if it ended early."""
    found: list[StageGraph] = []
    try:
        found.extend(proposals)
    except (KeyboardInterrupt, BudgetError) as stopped:
        if not found:
            raise
        return found, stopped
    return found, None


def stop_note(stop: Stop, count: int) -> str:
    """The note on a search that was ended after so many proposals."""
    return f"{str(stop) or 'interrupted'}: the best of the first {count} proposals"


def uninterrupted(work: Callable[[], object]) -> bool:
    """Do some work; False if that was interrupted."""
    try:
        work()
    except KeyboardInterrupt:
        return False
    return True


def to_its_end(make: Callable[[], Plan]) -> Plan:
    """The plan of a search that is over: a moment is left, which only a second interrupt ends."""
    try:
        return make()
    except KeyboardInterrupt:
        found = make()
        notes = (*found.notes, "interrupted when the search was over")
        return replace(found, notes=notes, interrupted=True)
