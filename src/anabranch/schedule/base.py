"""The contract of every schedule rule."""

from __future__ import annotations

from typing import Protocol

from anabranch.plans.stages import StageGraph
from anabranch.schedule.schedule import Schedule


class ScheduleRule(Protocol):
    """Decides the order of the micro-batches of every stage.

    A rule is a pure function in two parts: ``warm_up`` gives the stage graph with every stage's
    ``in_flight`` set, ``order`` turns those counts into one list of compute actions per device.
    Messages are put in by ``schedule.lower``.
    """

    def warm_up(self, graph: StageGraph) -> StageGraph:
        """The stage graph with in-flight counts; they never rise along an edge, in samples."""
        ...

    def order(self, graph: StageGraph) -> Schedule:
        """Compute actions per device for the in-flight counts of ``graph``."""
        ...
