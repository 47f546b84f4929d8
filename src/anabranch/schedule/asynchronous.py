"""Schedules of asynchronous training: 1F1B over mini-batches without a flush.

A stage fills the pipeline, then alternates a backward and a forward; ``U`` updates its weights
after the last backward of a mini-batch. Depth 3, one micro-batch per mini-batch::

    stage 0    F0 F1 F2 B0 U0 F3 B1 U1 F4 B2 U2 ...      in flight 3
    stage 1    F0 F1 B0 U0 F2 B1 U1 F3 B2 U2 F4 ...      in flight 2
    stage 2    F0 B0 U0 F1 B1 U1 F2 B2 U2 F3 B3 ...      in flight 1

In-flight counts are those of an endless batch: the longest distance to a sink plus 1.

Round robin (PipeDream, section 3: 1F1B-RR) is the same order over rounds. Replica r of R takes
mini-batches r, R + r, 2R + r, ... whole; R of them in a row are a round, which makes one update.
So a round is one micro-batch of R mini-batches, of which each replica holds one as its slice::

    stage 0, replica 0   F0 F2 B0 U0 F4 B2 U1 F6      numbers of F and B are those of mini-batches,
             replica 1   F1 F3 B1 U0 F5 B3 U1 F7      of U those of rounds
    stage 1              F0 B0 U0 F1 B1 U1 F2 B2

Let M be the most devices on a path from a stage to a sink, its own included. A replica holds
ceil(M / R) rounds; at the input stage of a chain this is the paper's NOAM.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count
from math import lcm

from anabranch.errors import InvalidPlanError
from anabranch.plans.in_flight import least_in_flight, with_in_flight
from anabranch.plans.stages import StageGraph
from anabranch.schedule.check import checked
from anabranch.schedule.kfkb import alternate, per_device, require_in_flight
from anabranch.schedule.schedule import Action, Kind, Schedule

ORDER = "1f1b"
"""The only order there is without a flush: a deeper warm-up would make weights more stale."""


def repeated(graph: StageGraph, batches: int) -> StageGraph:
    """Return the same stages with several mini-batches in a row as one batch."""
    return replace(graph, batch_size=batches * graph.batch_size)


def full_pipeline(graph: StageGraph, *, per_hop: int = 1) -> StageGraph:
    """Return the same stages with the micro-batches in flight of an endless batch."""
    most = max(stage.microbatch_size for stage in graph.stages)
    # No count can reach the number of micro-batches of so large a batch.
    long = replace(graph, batch_size=most * (per_hop * graph.depth + 1))
    return with_in_flight(graph, least_in_flight(long, per_hop=per_hop))


def warm_up(graph: StageGraph) -> StageGraph:
    """Set every stage's ``in_flight`` to that of the full pipeline, in micro-batches: the longest
    distance to a sink plus 1, even if a mini-batch has fewer.

    Raises:
        InvalidPlanError: if micro-batches do not divide the mini-batch or differ in size, or stages
            alternate groups of several.
    """
    sizes = [stage.microbatch_size for stage in graph.stages]
    if len(set(sizes)) > 1:
        raise InvalidPlanError(
            f"stage {sizes.index(max(sizes))} has micro-batches of {max(sizes)} samples, stage "
            f"{sizes.index(min(sizes))} of {min(sizes)}; asynchronous training updates all stages "
            "after the same samples: give all stages one microbatch_size"
        )
    for s, stage in enumerate(graph.stages):
        if graph.batch_size % stage.microbatch_size:
            raise InvalidPlanError(
                f"stage {s} has micro-batches of {stage.microbatch_size} samples, which do not "
                f"divide a mini-batch of {graph.batch_size}; without a flush every mini-batch must "
                "end with a whole one: choose a size that divides it"
            )
        if stage.k > 1:
            raise InvalidPlanError(
                f"stage {s} alternates groups of {stage.k} micro-batches; asynchronous training "
                "alternates single ones: make k 1 in the plan"
            )
    return full_pipeline(graph)


def units_in_flight(in_flight: int, microbatches: int) -> int:
    """Return the mini-batches of which a stage has a part in flight.

    Args:
        in_flight: micro-batches in flight.
        microbatches: micro-batches of a mini-batch.
    """
    return 1 - (1 - in_flight) // microbatches


def stage_actions(
    stage: int, in_flight: int, per_update: int, microbatches: int | None = None
) -> Iterator[Action]:
    """Generate forwards, backwards and updates of a stage.

    Args:
        per_update: micro-batches of an update.
        microbatches: micro-batches in all; None: endless.
    """
    for i in count() if microbatches is None else range(microbatches + in_flight - 1):
        if microbatches is None or i < microbatches:
            yield Action(stage, Kind.FORWARD, i)
        done = i - in_flight + 1
        if done >= 0 and (microbatches is None or done < microbatches):
            yield Action(stage, Kind.BACKWARD, done)
            if (done + 1) % per_update == 0:
                yield Action(stage, Kind.UPDATE, done // per_update)


@dataclass(frozen=True)
class AsynchronousOrder:
    """Order of forwards, backwards and updates of a stage graph without a flush.

    Attributes:
        graph: stages with in-flight counts, in micro-batches. With round robin a micro-batch of a
            stage is a round, and the batch is the shortest with whole rounds at all stages.
        per_update: micro-batches of an update.
        round_robin: replicas take mini-batches in turn instead of splitting each one.
    """

    graph: StageGraph
    per_update: int
    round_robin: bool = False

    @cached_property
    def turns(self) -> tuple[int, ...]:
        """Mini-batches of an update, by stage."""
        return tuple(stage.replicas if self.round_robin else 1 for stage in self.graph.stages)

    @cached_property
    def in_flight(self) -> tuple[int, ...]:
        """Updates of which a device holds a part between forward and backward, by stage."""
        return tuple(units_in_flight(s.in_flight, self.per_update) for s in self.graph.stages)

    @cached_property
    def late(self) -> int:
        """Number of later mini-batches after which a mini-batch has updated all weights."""
        return max((w + 1) * r - 1 for w, r in zip(self.in_flight, self.turns, strict=True))

    def deepest(self, stage: int) -> int:
        """Return the most mini-batches in flight at any stage, in updates of ``stage``."""
        held = max(w * r for w, r in zip(self.in_flight, self.turns, strict=True))
        return held // self.turns[stage]

    def actions(self, stage: int, microbatches: int | None = None) -> Iterator[Action]:
        """Generate the computes and updates of a stage, without end by default."""
        held = self.graph.stages[stage].in_flight
        return stage_actions(stage, held, self.per_update, microbatches)

    def schedule(self, batches: int | None = None) -> tuple[StageGraph, Schedule]:
        """Return the checked schedule of several batches of ``graph`` in a row.

        By default these are enough for a fill, more of the full pipeline than any stage holds, and
        a drain.

        Raises:
            InvalidScheduleError: if it is out of order.
            DeadlockError: if devices would wait for each other.
        """
        samples = self.graph.batch_size
        most = max(stage.in_flight * stage.microbatch_size for stage in self.graph.stages)
        whole = repeated(self.graph, batches or 2 * -(-most // samples) + 1)
        orders = [tuple(self.actions(s, whole.num_microbatches(s))) for s in range(len(whole))]
        by_device = {d: orders[s] for s, stage in enumerate(whole.stages) for d in stage.devices}
        return whole, checked(Schedule(by_device), whole)

    @property
    def minibatches(self) -> int:
        """Mini-batches of a batch of ``graph``."""
        return lcm(*self.turns)

    def computes(self, batches: int) -> tuple[StageGraph, Schedule]:
        """Return batches of ``graph`` in a row, and their unchecked order without updates.

        A replica that takes turns waits for its own mini-batch of a round alone, so counts may rise
        along a stage edge in samples, which they may not otherwise.
        """
        whole = repeated(self.graph, batches)
        if not self.round_robin:
            require_in_flight(whole)
        orders = [
            alternate(s, whole.num_microbatches(s), stage.in_flight, 1)
            for s, stage in enumerate(whole.stages)
        ]
        return whole, per_device(whole, orders)

    def for_turn(self, turn: int, samples: int) -> StageGraph:
        """Return the stages of one mini-batch of a round, each with the replica that takes it."""
        stages = tuple(
            replace(
                stage,
                devices=(stage.devices[turn % stage.replicas],),
                microbatch_size=samples,
                in_flight=1,
            )
            for stage in self.graph.stages
        )
        return replace(self.graph, stages=stages, batch_size=samples)


def split_batches(graph: StageGraph) -> AsynchronousOrder:
    """Return the order in which replicas split each mini-batch of ``graph``."""
    return AsynchronousOrder(graph, graph.num_microbatches(0))


def round_robin(graph: StageGraph, *, per_hop: int = 1) -> AsynchronousOrder:
    """Return the order in which replicas take mini-batches of ``graph`` in turn.

    Args:
        per_hop: with 2 more is in flight, which hides transfers.
    """
    paths = [0] * len(graph)  # mini-batches on the longest way to a sink
    for s in reversed(range(len(graph))):
        replicas = graph.stages[s].replicas
        after = (paths[t] + per_hop * replicas for t in graph.successors[s])
        paths[s] = max(after, default=replicas)
    stages = tuple(
        replace(
            stage,
            microbatch_size=graph.batch_size * stage.replicas,
            in_flight=-(-path // stage.replicas),
        )
        for stage, path in zip(graph.stages, paths, strict=True)
    )
    batch_size = graph.batch_size * lcm(*(stage.replicas for stage in stages))
    rounds = replace(graph, stages=stages, batch_size=batch_size)
    return AsynchronousOrder(rounds, per_update=1, round_robin=True)
