"""Seconds of a draft: of a step, or of the period of a stream of mini-batches."""

from __future__ import annotations

import math

import numpy as np

from anabranch.planner.auto.compiled.all_reduces import plan_all_reduces
from anabranch.planner.auto.compiled.clock import run_step
from anabranch.planner.auto.compiled.in_flight import fits, hold, least_in_flight, may_run, warm_up
from anabranch.planner.auto.compiled.jit import compiled, entry, making, part
from anabranch.planner.auto.compiled.layout import lay_out
from anabranch.planner.auto.compiled.messages import plan_messages
from anabranch.planner.auto.compiled.records import AllReduces, Layout, Marks
from anabranch.planner.auto.compiled.slices import SLICES, cut, price
from anabranch.planner.auto.compiled.stage_bytes import (
    weigh_operators,
    weigh_parameters,
    weigh_values,
)
from anabranch.planner.auto.compiled.updates import mark_gradients, price_updates
from anabranch.planner.auto.tables import UNKNOWN, Bools, Ints, Records, Tables


@entry
def evaluate(
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
    is_stream: bool,
    versions: Ints,
    in_flight: Ints,
) -> tuple[float, int, int]:
    """Seconds of a step of a draft, or from one mini-batch to the next without a flush; infinity
    where it cannot run or takes longer than ``limit``.

    Args:
        is_stream: without a flush.
        versions: of the weights of each stage, in topological order; without any only
            ``in_flight`` is asked for.
        in_flight: is filled in, per stage in topological order.

    Returns:
        The seconds; and where these are NaN, the tensor degree by its index and the samples of a
        slice whose seconds are missing in the tables.
    """
    charges = tables.charges[0]
    batch_size, memory_bytes = charges.batch_size, charges.memory_bytes
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
    if not fine or not _suits(layout, tables, is_stream):
        return nothing
    stages = layout.stages
    if is_stream:
        least_in_flight(layout, 1, False)
        for s in range(len(stages)):
            in_flight[s] = stages[s].in_flight
        if not len(versions):
            return 0.0, 0, 0
    weigh_operators(layout, tables)
    weigh_parameters(layout, tables)
    weigh_values(layout, tables)
    hold(stages, charges, sharded, versions)
    if not is_stream:
        warm_up(layout, memory_bytes, deep)
    if not fits(stages, memory_bytes) or not (is_stream or may_run(layout, batch_size)):
        return nothing
    slices = cut(layout, batch_size)
    known, missing = price(layout, slices, tables)
    if known == UNKNOWN:
        return math.nan, stages[missing // SLICES].degree, slices[missing].samples
    if known < 0:
        return nothing
    longest_update_s = price_updates(layout, tables, sharded)
    if not is_stream and _least_seconds(layout, slices) > limit:
        return nothing
    reduces = plan_all_reduces(layout, tables, sharded)
    marks = mark_gradients(layout, slices, reduces, tables)
    agrees = longest_update_s > 0 or charges.agreement_s > 0
    seconds = _seconds(layout, slices, reduces, marks, tables, agrees, is_stream, limit)
    return (seconds if seconds <= limit else math.inf), 0, 0


DIFFERENCE = 12
"""Units between runs that are compared: a multiple of most periods."""

SAME = 1e-6
"""How much increases may differ that are taken for one, as a share."""

MOST_RUNS = 5
"""Longer and longer ones of a stream."""


@making
def _seconds(
    layout: Layout,
    slices: Records,
    reduces: AllReduces,
    marks: Marks,
    tables: Tables,
    agrees: bool,
    is_stream: bool,
    limit: float,
) -> float:
    """Seconds of the step, or of the period of a stream.

    A pipeline that is full repeats itself. So a long step is as long as a short one and as many
    times what that grows by as are missing; a period is what a stream grows by. That is asked of
    three runs, each ``DIFFERENCE`` units longer than the one before.
    """
    unit, batch_size = _unit(layout), tables.charges[0].batch_size
    held = 1
    if is_stream:
        unit = batch_size
        for w in range(len(reduces.works)):
            owners = reduces.owners[reduces.works[w].owners]
            # Stages that share a parameter would drift apart.
            if owners.end_member - owners.first_member > 1:
                return math.inf
        for s in range(len(layout.stages)):
            layout.stages[s].update_s += tables.charges[0].step_s
    for s in range(len(layout.stages)):
        held = max(held, -(-layout.stages[s].in_flight * layout.stages[s].microbatch // unit))
    first, total, left = 3 * held + 4, batch_size // unit, batch_size % unit
    if not is_stream:
        first += (total - first) % DIFFERENCE
    ends = np.zeros(3)
    for run in range(MOST_RUNS):
        if not is_stream and (run or 2 * (first + 2 * DIFFERENCE) > total):
            break
        for i in range(3):
            samples = (first + i * DIFFERENCE) * unit + left
            updates = first + i * DIFFERENCE if is_stream else 1
            _set_length(layout, samples, updates)
            messages = plan_messages(layout, samples, tables)
            ends[i] = run_step(
                layout, slices, messages, reduces, marks, tables, agrees, is_stream, math.inf
            )
        more = ends[2] - ends[1]
        if abs(more - (ends[1] - ends[0])) <= SAME * more:
            if is_stream:
                return float(more / DIFFERENCE)
            return float(ends[2] + (total - first - 2 * DIFFERENCE) // DIFFERENCE * more)
        first *= 2
    if is_stream:
        # No period comes back: the pace of the slowest stage, which the others follow in the end.
        return float((ends[2] - ends[0]) / (2 * DIFFERENCE))
    _set_length(layout, batch_size, 1)
    messages = plan_messages(layout, batch_size, tables)
    return run_step(layout, slices, messages, reduces, marks, tables, agrees, False, limit)


@compiled
def _unit(layout: Layout) -> int:
    """The least samples after which every stage has run whole groups."""
    unit = 1
    for s in range(len(layout.stages)):
        group = layout.stages[s].k * layout.stages[s].microbatch
        unit = unit // math.gcd(unit, group) * group
    return unit


@compiled
def _set_length(layout: Layout, samples: int, updates: int) -> None:
    """Let the stages run so many samples."""
    for s in range(len(layout.stages)):
        stage = layout.stages[s]
        stage.count = -(-samples // stage.microbatch)
        stage.per_update = stage.count // updates


@part
def _suits(layout: Layout, tables: Tables, is_stream: bool) -> bool:
    """Whether sizes, replicas and groups of devices are as a plan may have them; without a flush
    all stages update after the same micro-batches, and these alternate one by one.
    """
    charges, node, suits = tables.charges[0], tables.levels[0].group, True
    for s in range(len(layout.stages)):
        stage = layout.stages[s]
        suits &= stage.replicas <= stage.microbatch <= charges.batch_size
        suits &= stage.replicas <= charges.max_replicas
        if is_stream:
            suits &= stage.microbatch == layout.stages[0].microbatch
            suits &= charges.batch_size % stage.microbatch == 0 and stage.k == 1
        for first in range(stage.first_lane, stage.end_lane, stage.tensor):
            last = first + stage.tensor - 1
            suits &= layout.lanes[first].device // node == layout.lanes[last].device // node
    return bool(suits)


@part
def _least_seconds(layout: Layout, slices: Records) -> float:
    """A lower bound of the step, as ``simulator.objective.least_step_s`` without all-reduces; what
    lies before and behind the compute of a stage is noted for the clock.
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
        busy = last.forward_s + last.backward_s
        busy += (stage.count - 1) * (full.forward_s + full.backward_s)
        longest = max(longest, stage.head_s + busy + stage.tail_s)
    return longest


@compiled
def _least(slices: Records, s: int, forward: bool) -> float:
    """Seconds of the shortest forward or backward of a stage."""
    least = math.inf
    for at in range(SLICES * s, SLICES * (s + 1)):
        here = slices[at]
        if here.lanes and here.samples:
            least = min(least, here.forward_s if forward else here.backward_s)
    return least
