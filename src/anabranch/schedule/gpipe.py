"""GPipe: all forwards, then all backwards.

On a chain of three equal stages, with four micro-batches::

    stage 0  F0 F1 F2 F3  .  .  .  . B0 B1 B2 B3
    stage 1   . F0 F1 F2 F3  .  . B0 B1 B2 B3
    stage 2   .  . F0 F1 F2 F3 B0 B1 B2 B3

The bubble is that of 1F1B; every stage holds all micro-batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from anabranch.plans.in_flight import with_in_flight
from anabranch.plans.stages import StageGraph
from anabranch.schedule.base import Room
from anabranch.schedule.kfkb import alternate, per_device, require_in_flight
from anabranch.schedule.schedule import Schedule


@dataclass(frozen=True)
class GPipe:
    """All forwards, then all backwards, on any stage graph.

    Backwards run in the order of the forwards (C4), not reversed as in the GPipe paper, so that
    gradients add up in one order under every schedule.
    """

    per_hop: ClassVar[int] = 0

    def warm_up(self, graph: StageGraph, room: Room | None = None) -> StageGraph:
        """Set in-flight counts to all micro-batches; ``room`` is ignored."""
        return with_in_flight(graph, map(graph.num_microbatches, range(len(graph))))

    def order(self, graph: StageGraph) -> Schedule:
        """Return all forwards, then all backwards; k is ignored.

        Raises:
            InvalidScheduleError: if a stage has no in-flight count, or counts rise along an edge.
        """
        require_in_flight(graph)
        counts = [graph.num_microbatches(s) for s in range(len(graph))]
        return per_device(graph, [alternate(s, m, m, m) for s, m in enumerate(counts)])
