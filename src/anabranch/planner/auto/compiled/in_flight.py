"""Micro-batches in flight of the stages of a layout, and whether they fit memory.

What ``schedule.kfkb`` decides for ``1f1b`` and ``1f1b-deep``, and what ``plans.check`` asks.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from anabranch.cost.memory import memory_terms, updated_bytes
from anabranch.planner.auto.compiled.jit import compiled, making, part
from anabranch.planner.auto.compiled.records import Layout
from anabranch.planner.auto.tables import Ints, Records
from anabranch.plans.in_flight import in_flight_samples

_in_flight_samples = compiled(in_flight_samples)
_memory_terms = compiled(memory_terms)
updated_trainable = compiled(updated_bytes)

DEEP = 2
"""Times that the increase of Table 2 is taken along each edge under ``1f1b-deep``."""


@compiled
def hold(stages: Records, charges: Any, sharded: bool, versions: Ints) -> None:
    """Terms of the memory of each stage, with so many versions of its weights."""
    for s in range(len(stages)):
        stage = stages[s]
        samples = -(-stage.microbatch // stage.replicas)
        updated = stage.trainable
        if sharded:
            updated = updated_trainable(stage.trainable, stage.largest, stage.replicas)
        resident, flight, backward, sums = _memory_terms(
            stage.parameters,
            stage.trainable,
            updated,
            stage.largest_gradient if stage.rows > 0 else stage.largest,
            stage.tables,
            stage.rows,
            stage.kept * samples,
            stage.entering * samples + stage.entering_fixed,
            stage.returning * samples + stage.returning_fixed,
            stage.replicas,
            charges.optimizer_factor,
            charges.receive_slots,
            stage.recompute,
            versions[s],
        )
        stage.fixed_bytes = resident + backward
        stage.flight_bytes = flight
        stage.end_bytes = resident + sums


@compiled
def peak_bytes(stage: Any, in_flight: int) -> float:
    """Most bytes with so many micro-batches in flight; ``DeviceMemory.peak``."""
    return float(max(stage.fixed_bytes + in_flight * stage.flight_bytes, stage.end_bytes))


@making
def warm_up(layout: Layout, memory_bytes: float, deep: bool) -> None:
    """``KFKB.warm_up``: a deep one only as far as memory has room."""
    stages = layout.stages
    least_in_flight(layout, 1, True)
    if not deep:
        return
    least = np.empty(len(stages), np.int64)
    for s in range(len(stages)):
        least[s] = stages[s].in_flight
    least_in_flight(layout, DEEP, True)
    for s in range(len(stages)):
        stage = stages[s]
        if stage.in_flight <= least[s]:
            continue
        most = min(stage.in_flight, _room(stage, memory_bytes))
        for at in range(stage.first_in, stage.end_in):
            before = stages[layout.edges[layout.in_edges[at]].source]
            most = min(most, before.in_flight * before.microbatch // stage.microbatch)
        stage.in_flight = max(least[s], most)


@compiled
def least_in_flight(layout: Layout, per_hop: int, is_cut: bool) -> None:
    """``plans.in_flight.least_in_flight``; ``is_cut`` to the micro-batches of a batch."""
    for s in range(len(layout.stages) - 1, -1, -1):
        stage = layout.stages[s]
        samples = stage.k * stage.microbatch
        for e in range(stage.first_out, stage.end_out):
            after = layout.stages[layout.edges[e].target]
            held = after.in_flight * after.microbatch
            least = _in_flight_samples(stage.k, stage.microbatch, after.k, after.microbatch, held)
            samples = max(samples, held + per_hop * (least - held))
        stage.in_flight = -(-samples // stage.microbatch)
        if is_cut:
            stage.in_flight = min(stage.in_flight, stage.count)


@part
def _room(stage: Any, memory_bytes: float) -> int:
    """Micro-batches in flight that the memory of a stage's devices holds."""
    none, one = peak_bytes(stage, 0), peak_bytes(stage, 1)
    if one <= none:
        return int(stage.count)
    # The quotient may be too large for an integer.
    return int(min((memory_bytes - none) // (one - none), float(stage.in_flight)))


@compiled
def fits(stages: Records, memory_bytes: float) -> bool:
    """Whether the devices of all stages have memory for what is in flight."""
    for s in range(len(stages)):
        if peak_bytes(stages[s], stages[s].in_flight) > memory_bytes:
            return False
    return True


@compiled
def may_run(layout: Layout, batch_size: int) -> bool:
    """Whether kFkB takes these counts: whole groups, and no rise along an edge in samples."""
    for s in range(len(layout.stages)):
        stage = layout.stages[s]
        if stage.in_flight < min(stage.k, stage.count):
            return False
        held = min(stage.in_flight * stage.microbatch, batch_size)
        for e in range(stage.first_out, stage.end_out):
            after = layout.stages[layout.edges[e].target]
            if held < min(after.in_flight * after.microbatch, batch_size):
                return False
    return True
