"""Seconds of a step of a draft."""

from __future__ import annotations

import math

import numpy as np

from anabranch.planner.auto.compiled.all_reduces import plan_all_reduces
from anabranch.planner.auto.compiled.clock import run_step
from anabranch.planner.auto.compiled.in_flight import hold, may_run, warm_up
from anabranch.planner.auto.compiled.jit import compiled, entry, part
from anabranch.planner.auto.compiled.layout import lay_out
from anabranch.planner.auto.compiled.messages import plan_messages
from anabranch.planner.auto.compiled.records import Layout
from anabranch.planner.auto.compiled.slices import cut, price
from anabranch.planner.auto.compiled.stage_bytes import (
    weigh_operators,
    weigh_parameters,
    weigh_values,
)
from anabranch.planner.auto.compiled.updates import mark_gradients, price_updates
from anabranch.planner.auto.tables import UNKNOWN, Bools, Ints, Records, Tables


@entry
def step_seconds(
    home: Ints,
    owner: Ints,
    microbatch: Ints,
    k: Ints,
    recompute: Bools,
    tensor: Ints,
    deep: bool,
    chained: bool,
    sharded: bool,
    tables: Tables,
    limit: float,
) -> tuple[float, int, int]:
    """Seconds of a step, infinity where there is none or it takes longer than ``limit``.

    Returns:
        The seconds; and where these are NaN, the tensor degree by its index and the samples of a
        slice whose seconds are missing in the tables.
    """
    batch_size = tables.charges[0].batch_size
    nothing = math.inf, 0, 0
    fine, layout = lay_out(
        home,
        owner,
        microbatch,
        k,
        recompute,
        tensor,
        chained,
        tables.degrees,
        tables.op_edges,
        batch_size,
    )
    if not fine or not _suits(layout, tables):
        return nothing
    weigh_operators(layout, tables)
    weigh_parameters(layout, tables)
    weigh_values(layout, tables)
    stages, memory_bytes = layout.stages, tables.charges[0].memory_bytes
    hold(stages, tables.charges[0], sharded, np.ones(len(stages), np.int64))
    warm_up(layout, memory_bytes, deep)
    if not may_run(layout, batch_size, memory_bytes):
        return nothing
    slices = cut(layout, batch_size)
    known, missing = price(layout, slices, tables)
    if known == UNKNOWN:
        here = slices[missing]
        return math.nan, stages[missing // 4].degree, here.samples
    if known < 0:
        return nothing
    longest_update_s = price_updates(layout, tables, sharded)
    if _least_seconds(layout, slices) > limit:
        return nothing
    messages = plan_messages(layout, batch_size, tables)
    reduces = plan_all_reduces(layout, tables, sharded)
    marks = mark_gradients(layout, slices, reduces, tables)
    agrees = longest_update_s > 0 or tables.charges[0].agreement_s > 0
    seconds = run_step(layout, slices, messages, reduces, marks, tables, agrees, limit)
    return (seconds if seconds <= limit else math.inf), 0, 0


@part
def _suits(layout: Layout, tables: Tables) -> bool:
    """Whether sizes, replicas and groups of devices are as a plan may have them."""
    charges, node = tables.charges[0], tables.levels[0].group
    for s in range(len(layout.stages)):
        stage = layout.stages[s]
        if not stage.replicas <= stage.microbatch <= charges.batch_size:
            return False
        if stage.replicas > charges.max_replicas:
            return False
        for first in range(stage.first_lane, stage.end_lane, stage.tensor):
            last = first + stage.tensor - 1
            if layout.lanes[first].device // node != layout.lanes[last].device // node:
                return False
    return True


@part
def _least_seconds(layout: Layout, slices: Records) -> float:
    """A lower bound of the step, as ``simulator.objective.least_step_s`` without all-reduces; what
    each lane computes, and what lies before and behind it, is noted for the clock.
    """
    stages, lanes = layout.stages, layout.lanes
    for s in range(len(stages)):
        stage = stages[s]
        for at in range(stage.first_in, stage.end_in):
            x = layout.edges[layout.in_edges[at]].source
            least = _least(slices, x, True)
            stage.head_s = max(stage.head_s, stages[x].head_s + least)
    for s in range(len(stages)):
        stages[s].tail_s = stages[s].update_s
    for e in range(len(layout.edges)):
        edge = layout.edges[e]
        if edge.gradients > 0 or edge.values == 0:
            least = _least(slices, edge.source, False)
            tail_s = stages[edge.source].tail_s + least
            stages[edge.target].tail_s = max(stages[edge.target].tail_s, tail_s)
    longest = 0.0
    for at in range(len(lanes)):
        lane = lanes[at]
        stage, full, last = stages[lane.stage], slices[lane.full], slices[lane.last]
        lane.left_s = last.forward_s + last.backward_s
        lane.left_s += (stage.count - 1) * (full.forward_s + full.backward_s)
        longest = max(longest, stage.head_s + lane.left_s + stage.tail_s)
    return longest


@compiled
def _least(slices: Records, s: int, forward: bool) -> float:
    """Seconds of the shortest forward or backward of a stage."""
    least = math.inf
    for at in range(4 * s, 4 * s + 4):
        here = slices[at]
        if here.lanes and here.samples:
            least = min(least, here.forward_s if forward else here.backward_s)
    return least
