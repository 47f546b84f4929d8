"""Split backwards in a list schedule: gradients of inputs first, those of weights in the gaps.

A stage waits for the gradients of inputs (I) of the stages behind it, and none for those of
weights (W). So W can wait until a device has nothing else to do, and the pipeline drains sooner. A
chain of four equal stages whose memory holds four micro-batches, I and W as long as F::

    stage 0  F0 F1 F2 F3  .  .  .  B0 -- F4 B1 -- ...
    stage 1  .  F0 F1 F2  .  . I0 F3 W0 I1 F4 W1 ...
    stage 2  .  .  F0 F1  . I0 F2 I1 F3 W0 ...
    stage 3  .  .  .  F0 I0 F1 I1 F2 I2 W0 ...

(Qi et al., *Zero Bubble Pipeline Parallelism*, 2024, sections 2 and 3, on a chain, with schedules
H1 and H2 by hand and a heuristic.) Here the computes of any stage graph are simulated once, in the
order of their start. A device takes gradients of inputs first, as the step waits for the way back,
then forwards, then the rest; W only into a gap that is long enough, or where memory holds no
further micro-batch. No stage waits for the gradients of a first stage's inputs, so its backward
stays whole. Then passes are moved once more (``schedule.justify``). ``Stage`` says how long passes
and messages take; the best of two lists is taken.

Of 100 drawn stage graphs of up to 6 stages and 8 micro-batches (``python -m benchmarks.schedules``)
100 lists are the shortest where stages are alike, and 95 where passes take 1 to 3 s; without the
moves and with W only into gaps of its length 88 and 82. The work is done in ``list_passes``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

from anabranch.plans.in_flight import least_in_flight, with_in_flight
from anabranch.plans.stages import Stage, StageGraph
from anabranch.schedule.base import Room
from anabranch.schedule.kfkb import KFKB
from anabranch.schedule.schedule import Order, Schedule


@dataclass(frozen=True)
class ZeroBubble:
    """A list schedule with split backwards.

    Attributes:
        memory: samples that a stage may hold, as a multiple of the fullest stage's under 1F1B. On a
            chain 1 is H1, 2 is H2.
    """

    memory: int = 1

    per_hop: ClassVar[int] = 0

    def warm_up(self, graph: StageGraph, room: Room | None = None) -> StageGraph:
        """Set the most micro-batches between a forward and the end of its backward."""
        graph = with_in_flight(graph, self.most_in_flight(graph, room))
        from anabranch.schedule.list_passes import ListPasses, lengths_of

        passes = ListPasses(graph)
        schedule = passes.scheduled(lengths_of(graph.stages))
        return with_in_flight(graph, passes.most_in_flight(schedule))

    def most_in_flight(self, graph: StageGraph, room: Room | None = None) -> list[int]:
        """Return the micro-batches that each stage may hold."""
        least = least_in_flight(graph)
        sizes = [stage.microbatch_size for stage in graph.stages]
        most = self.memory * max(n * size for n, size in zip(least, sizes, strict=True))
        counts: list[int] = []
        for s, size in enumerate(sizes):
            before = (counts[x] * sizes[x] for x in graph.predecessors[s])
            fitting = graph.num_microbatches(s) if room is None else room(s)
            allowed = min([-(-most // size), fitting, *(samples // size for samples in before)])
            counts.append(min(max(allowed, least[s]), graph.num_microbatches(s)))
        return counts

    def order(self, graph: StageGraph) -> Schedule:
        """Return the order in which computes start."""
        return Schedule(_orders(graph))


@lru_cache(maxsize=256)
def _orders(graph: StageGraph) -> dict[int, Order]:
    """Return the list that ends first of two: made with the lengths of passes as they are, or as if
    all stages were alike, which makes regular lists.
    """
    from anabranch.schedule.list_passes import ListPasses, lengths_of

    own, alike = lengths_of(graph.stages), lengths_of([ALIKE] * len(graph))
    passes, schedules = ListPasses(graph), []
    for lengths in (own, alike)[: 1 if own == alike else 2]:
        schedule = passes.improved(passes.scheduled(lengths), lengths)
        schedules.append(passes.improved(schedule, own))
    return passes.orders(min(schedules, key=lambda schedule: schedule.end))


ALIKE = Stage(("any",), (0,), 1)


@dataclass(frozen=True)
class InputsFirst:
    """1F1B whose backwards are split: gradients of inputs, which are sent, then those of weights.

    Attributes:
        increase: increase of the warm-up per stage edge, see ``KFKB.per_hop``.
    """

    increase: int = 1

    per_hop: ClassVar[int] = 0

    def warm_up(self, graph: StageGraph, room: Room | None = None) -> StageGraph:
        """Set in-flight counts as 1F1B does."""
        return KFKB(self.increase).warm_up(graph, room)

    def order(self, graph: StageGraph) -> Schedule:
        """Return the order of 1F1B with both halves of a backward in its place."""
        split = frozenset(s for s, before in enumerate(graph.predecessors) if before)
        whole = KFKB(self.increase).order(graph).orders
        return Schedule({device: order.split(split) for device, order in whole.items()})
