"""kFkB: some forwards to warm up, then k backwards and k forwards in turn, then the drain.

1F1B is k = 1. On a chain of four equal stages with minimal warm-up (GraphPipe, section 6)::

    stage 0  F0 F1 F2 F3  .  .  . B0 F4 B1 F5 B2  . B3  . B4  . B5    in flight 4
    stage 1   . F0 F1 F2  .  . B0 F3 B1 F4 B2 F5 B3  . B4  . B5       in flight 3
    stage 2   .  . F0 F1  . B0 F2 B1 F3 B2 F4 B3 F5 B4  . B5          in flight 2
    stage 3   .  .  . F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5             in flight 1

A stage must hold one group of micro-batches more than its successor, or than the successor that
holds most. So on a graph the longest distance to a sink counts, not the number of stages. Counts
are in samples, because micro-batch sizes may differ between stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from anabranch.errors import InvalidScheduleError
from anabranch.plans.in_flight import least_in_flight, waited_for_samples, with_in_flight
from anabranch.plans.stages import StageGraph
from anabranch.schedule.base import Room
from anabranch.schedule.schedule import Kind, Order, Schedule, computes_of


@dataclass(frozen=True)
class KFKB:
    """kFkB on a stage graph; every stage has its own k and micro-batch size.

    With one micro-batch size and k = 1, a stage at longest distance h to a sink holds ``h + 1``
    micro-batches for ``per_hop = 1`` (GraphPipe, Table 2; DAPPLE's policy PA on a chain) and ``2h +
    1`` for ``per_hop = 2`` (DAPPLE's policy PB): twice the headroom, which hides transfers behind
    compute.

    Attributes:
        per_hop: how many times the increase from Table 2 is taken along each stage edge.
    """

    per_hop: int = 1

    def warm_up(self, graph: StageGraph, room: Room | None = None) -> StageGraph:
        """Set ``in_flight`` of every stage, never more than it has micro-batches.

        If the counts of ``per_hop`` do not fit memory, they are as large as fits, and at least the
        minimum. Counts may not rise along a stage edge, so this limits the successors, too.
        """
        counts = least_in_flight(graph, per_hop=self.per_hop)
        if room is not None:
            for s, least in enumerate(least_in_flight(graph)):
                if counts[s] > least:
                    before = (_most_behind(graph, x, s, counts[x]) for x in graph.predecessors[s])
                    counts[s] = max(least, min([counts[s], room(s), *before]))
        return with_in_flight(graph, counts)

    def order(self, graph: StageGraph) -> Schedule:
        """Return the order with every backward as early as the counts allow."""
        require_in_flight(graph)
        orders = []
        for s, stage in enumerate(graph.stages):
            num_microbatches = graph.num_microbatches(s)
            if stage.in_flight < min(stage.k, num_microbatches):
                raise InvalidScheduleError(
                    f"stage {s} alternates groups of {stage.k} micro-batches but may hold only "
                    f"{stage.in_flight}; set its in_flight to at least "
                    f"{min(stage.k, num_microbatches)}"
                )
            orders.append(alternate(s, num_microbatches, stage.in_flight, stage.k))
        return per_device(graph, orders)


def _most_behind(graph: StageGraph, x: int, y: int, in_flight: int) -> int:
    """Return the most micro-batches of y if its predecessor x holds ``in_flight``."""
    stage, after = graph.stages[x], graph.stages[y]
    if in_flight >= graph.num_microbatches(x):
        return graph.num_microbatches(y)
    both = stage.k, stage.microbatch_size, after.k, after.microbatch_size
    return (in_flight * stage.microbatch_size - waited_for_samples(*both)) // after.microbatch_size


@lru_cache(maxsize=1 << 10)
def alternate(stage: int, num_microbatches: int, in_flight: int, k: int) -> Order:
    """Return the computes of a stage: ``in_flight`` forwards, k backwards, k forwards, ..."""
    forwards = computes_of(stage, Kind.FORWARD, num_microbatches)
    backwards = computes_of(stage, Kind.BACKWARD, num_microbatches)
    result = [*forwards[:in_flight]]
    for done in range(0, num_microbatches, k):
        result += backwards[done : done + k]
        result += forwards[in_flight + done : in_flight + done + k]
    return Order(result)


def require_in_flight(graph: StageGraph) -> None:
    """Raise an error unless in-flight counts are set and, in samples, never rise along an edge.

    If y runs more samples forward before its first backward than x does before its own, y waits for
    further samples of x, and x waits for gradients of y.
    """
    for s, stage in enumerate(graph.stages):
        if stage.in_flight == 0:
            raise InvalidScheduleError(
                f"in_flight of stage {s} is 0, so it would begin no micro-batch; set it to how "
                "many may be between forward and backward, or leave in_flight out of all stages of "
                "a plan file for the counts of its schedule"
            )
    held = [
        min(stage.in_flight * stage.microbatch_size, graph.batch_size) for stage in graph.stages
    ]
    for x, y in graph.edges:
        if held[x] < held[y]:
            raise InvalidScheduleError(
                f"the warm-up rises along stage edge {x} -> {y}: stage {x} runs {held[x]} samples "
                f"forward before its first backward, stage {y} runs {held[y]}, so each would wait "
                f"for the other; set in_flight of stage {x} to at least "
                f"{-(-held[y] // graph.stages[x].microbatch_size)}"
            )


def per_device(graph: StageGraph, orders: Sequence[Order]) -> Schedule:
    """Return the schedule: per device the order of its stage, or its stages' orders merged."""
    if graph.shares_devices:
        from anabranch.schedule.list_passes import interleaved

        return Schedule(interleaved(graph, orders))
    return Schedule({device: orders[stages[0]] for device, stages in graph.stages_of.items()})
