"""The contract of every schedule rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from anabranch.plans.stages import StageGraph
from anabranch.schedule.schedule import Schedule

Room = Callable[[int], int]
"""Stage -> micro-batches in flight that fit into the memory of its devices."""


class ScheduleRule(Protocol):
    """Decides the order of forwards and backwards of every stage.

    A rule is a pure function in two parts: ``warm_up`` gives the stage graph with every stage's
    ``in_flight`` set, ``order`` turns those counts into one list of compute actions per device.
    Messages are put in by ``schedule.lower``.

    Attributes:
        per_hop: micro-batches that a stage has in flight beyond those of the next, where
            mini-batches follow one another without a flush; 0 for a rule that waits for the end of
            a batch.
    """

    @property
    def per_hop(self) -> int: ...

    def warm_up(self, graph: StageGraph, room: Room | None = None) -> StageGraph:
        """Set in-flight counts; counted in samples, they never rise along an edge."""

    def order(self, graph: StageGraph) -> Schedule:
        """Return compute actions per device for the in-flight counts of ``graph``."""
