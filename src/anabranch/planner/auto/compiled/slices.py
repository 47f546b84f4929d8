"""Slices: the samples that devices of a stage compute at a time, and their seconds.

Each stage has four: the smaller and the larger slice of its full micro-batches, then of its last
one, which may be short. Replicas with slices of equal size are as one.
"""

from __future__ import annotations

import numpy as np

from anabranch.planner.auto.compiled.jit import compiled, making
from anabranch.planner.auto.compiled.records import SLICE, Layout
from anabranch.planner.auto.tables import Records, Tables

SLICES = 4
"""Of each stage."""

LAST = 2
"""The first of those of the last micro-batch."""


@making
def cut(layout: Layout, batch_size: int) -> Records:
    """The slices of all stages, without seconds; each lane learns which are its own."""
    stages = layout.stages
    slices = np.zeros(SLICES * len(stages), SLICE)
    for s in range(len(stages)):
        stage = stages[s]
        last = batch_size - (stage.count - 1) * stage.microbatch
        sizes = (stage.microbatch, last)
        for kind in range(2):
            low = sizes[kind] // stage.replicas
            slices[SLICES * s + LAST * kind].samples = low
            slices[SLICES * s + LAST * kind + 1].samples = low + 1
        for at in range(stage.first_lane, stage.end_lane):
            lane = layout.lanes[at]
            for kind in range(2):
                size, low = sizes[kind], sizes[kind] // stage.replicas
                start = size * lane.replica // stage.replicas
                held = size * (lane.replica + 1) // stage.replicas - start
                mine = SLICES * s + LAST * kind + (held - low)
                slices[mine].lanes += 1
                if kind:
                    lane.last = mine
                else:
                    lane.full = mine
    return slices


@compiled
def price(layout: Layout, slices: Records, tables: Tables) -> tuple[int, int]:
    """Seconds of the slices that any lane has.

    Returns:
        0; or ``UNKNOWN`` or ``UNCOVERED``, and the first slice that is so.
    """
    for at in range(len(slices)):
        here, stage = slices[at], layout.stages[at // SLICES]
        if not here.lanes or not here.samples:
            continue
        row = tables.row[stage.degree, here.samples]
        if row < 0:
            return row, at
        forward = backward = 0.0
        for op in range(stage.first_op, stage.end_op):
            forward += tables.seconds[row, layout.ops[op]].forward
            backward += tables.seconds[row, layout.ops[op]].backward
        if stage.recompute:
            backward += forward
        here.forward_s = forward + tables.charges[0].microbatch_s
        here.backward_s = backward + tables.charges[0].microbatch_s
    return 0, 0
