"""Messages between the stages of a layout, as flows.

Slices of two stages overlap in a pattern that repeats itself after the least common multiple of
their micro-batches, a unit. What one lane sends another for such an overlap is a flow; each of its
copies, one per unit, is a message. Part of a unit at the end of the batch has flows of its own::

    samples     0   2   4   6   8   10  12         x: micro-batches of 4      unit 4: two flows,
    stage x     |   0   |   1   |   2   |          y: micro-batches of 2      of three copies each
    stage y     | 0 | 1 | 2 | 3 | 4 | 5 |          on one device each

Messages from one lane to another are of one channel, which has a few receives posted ahead: those
of a micro-batch of the receiver are posted when all of an earlier one are taken. So a flow has

    same   the next flow of the same micro-batch in its channel, or -1
    next   the first flow of the next micro-batch in its channel, or -1; where that ``is_wrap``, it
           is the next copy of it, and behind the last one comes ``rest``
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from anabranch.planner.auto.compiled.jit import compiled, making, part
from anabranch.planner.auto.compiled.ports import level_of, put_ports
from anabranch.planner.auto.compiled.records import FLOW, OVERLAP, Layout, Messages
from anabranch.planner.auto.tables import Bools, Ints, Records, Tables


@making
def plan_messages(layout: Layout, batch_size: int, tables: Tables) -> Messages:
    """The flows of all edges, forward and back."""
    overlaps, bounds = _overlaps(layout, batch_size)
    count, slots = 0, tables.charges[0].receive_slots
    for e in range(len(layout.edges)):
        edge = layout.edges[e]
        x, y = layout.stages[edge.source], layout.stages[edge.target]
        number = edge.end_overlap - edge.first_overlap
        edge.first_flow = count
        count += number * y.tensor
        edge.first_back = -1
        # An edge without values orders two stages: it has messages of no bytes both ways.
        if edge.gradients > 0 or edge.values == 0:
            edge.first_back = count
            count += number * x.tensor
    flows = np.zeros(count, FLOW)
    for e in range(len(layout.edges)):
        edge = layout.edges[e]
        _add_flows(layout, edge, overlaps, flows, True)
        if edge.first_back >= 0:
            _add_flows(layout, edge, overlaps, flows, False)
    ports = np.empty((count, 2 * len(tables.levels)), np.int64)
    posted = np.zeros(_price(layout, flows, ports, tables), np.bool_)
    for e in range(len(layout.edges)):
        edge = layout.edges[e]
        x, y = layout.stages[edge.source], layout.stages[edge.target]
        whole = edge.rest_overlap - edge.first_overlap
        number = edge.end_overlap - edge.first_overlap
        first, t = edge.first_flow, y.tensor
        _link(flows, first, first + whole * t, first + number * t, x, y)
        _post(flows, first, first + number * t, slots, posted)
        first, t = edge.first_back, x.tensor
        if first >= 0:
            _link(flows, first, first + whole * t, first + number * t, y, x)
            _post(flows, first, first + number * t, slots, posted)
    return Messages(bounds, flows, ports, posted)


@part
def _overlaps(layout: Layout, batch_size: int) -> tuple[Records, Ints]:
    """The overlaps of all edges, and where those of each slice begin."""
    bound = most = 0
    for e in range(len(layout.edges)):
        edge = layout.edges[e]
        x, y = layout.stages[edge.source], layout.stages[edge.target]
        unit = x.microbatch // math.gcd(x.microbatch, y.microbatch) * y.microbatch
        edge.copies = batch_size // unit
        edge.source_unit, edge.target_unit = unit // x.microbatch, unit // y.microbatch
        left = batch_size - edge.copies * unit
        edge.source_bound = bound
        bound += _num_bounds(edge.copies, edge.source_unit, left, x)
        edge.target_bound = bound
        bound += _num_bounds(edge.copies, edge.target_unit, left, y)
        most += bound - edge.source_bound
    bounds, overlaps = np.zeros(bound, np.int64), np.empty(most, OVERLAP)
    count = 0
    for e in range(len(layout.edges)):
        edge = layout.edges[e]
        x, y = layout.stages[edge.source], layout.stages[edge.target]
        unit = edge.source_unit * x.microbatch
        edge.first_overlap = count
        source, target = edge.source_bound, edge.target_bound
        if edge.copies:
            count = _cut(x, y, unit, overlaps, count, bounds[source:], bounds[target:])
            source += edge.source_unit * x.replicas + 1
            target += edge.target_unit * y.replicas + 1
        edge.rest_overlap = count
        left = batch_size - edge.copies * unit
        if left:
            count = _cut(x, y, left, overlaps, count, bounds[source:], bounds[target:])
        edge.end_overlap = count
    return overlaps, bounds


@compiled
def _num_bounds(copies: int, per_unit: int, left: int, stage: Any) -> int:
    """Bounds of the slices of a stage in a unit and in what is left."""
    count = 0
    if copies:
        count += per_unit * stage.replicas + 1
    if left:
        count += -(-left // stage.microbatch) * stage.replicas + 1
    return count


@compiled
def _cut(
    x: Any, y: Any, samples: int, overlaps: Records, count: int, made: Ints, needed: Ints
) -> int:
    """Add the overlaps of so many samples, ascending; ``schedule.lower.overlaps``."""
    last_a = -(-samples // x.microbatch) * x.replicas
    last_b = -(-samples // y.microbatch) * y.replicas
    a = b = 0
    made[0] = needed[0] = count
    while a < last_a and b < last_b:
        start_a, stop_a = _slice(x, a, samples)
        start_b, stop_b = _slice(y, b, samples)
        start, stop = max(start_a, start_b), min(stop_a, stop_b)
        if start < stop:
            overlap = overlaps[count]
            overlap.source, overlap.target = a % x.replicas, b % y.replicas
            overlap.target_batch, overlap.source_batch = b // y.replicas, a // x.replicas
            overlap.samples = stop - start
            count += 1
        if stop_a <= stop_b:
            a += 1
            made[a] = count
        if stop_b <= stop_a:
            b += 1
            needed[b] = count
    return count


@compiled
def _slice(stage: Any, at: int, samples: int) -> tuple[int, int]:
    """Samples [start, stop) of one of the slices of so many samples."""
    first = at // stage.replicas * stage.microbatch
    size, replica = min(stage.microbatch, samples - first), at % stage.replicas
    start = first + size * replica // stage.replicas
    return start, first + size * (replica + 1) // stage.replicas


@compiled
def _add_flows(layout: Layout, edge: Any, overlaps: Records, flows: Records, forward: bool) -> None:
    """The flows of an edge in one direction; ``schedule.lower.device_pairs``, and the bytes."""
    x, y = layout.stages[edge.source], layout.stages[edge.target]
    sender, receiver = (x, y) if forward else (y, x)
    per_sample = edge.forward if forward else edge.back
    fixed = edge.forward_fixed if forward else edge.back_fixed
    f = edge.first_flow if forward else edge.first_back
    for o in range(edge.first_overlap, edge.end_overlap):
        overlap = overlaps[o]
        r, q = overlap.source, overlap.target
        batch = overlap.target_batch if forward else overlap.source_batch
        if not forward:
            r, q = q, r
        for k in range(receiver.tensor):
            flow = flows[f]
            flow.source = sender.first_lane + r * sender.tensor + k % sender.tensor
            flow.target = receiver.first_lane + q * receiver.tensor + k
            flow.batch = batch
            flow.copies = edge.copies if o < edge.rest_overlap else 1
            flow.nbytes = per_sample * overlap.samples + fixed
            f += 1


@part
def _price(layout: Layout, flows: Records, ports: Ints, tables: Tables) -> int:
    """Price the flows, number the messages and count them."""
    count, charges = 0, tables.charges[0]
    for f in range(len(flows)):
        flow = flows[f]
        a, b = layout.lanes[flow.source].device, layout.lanes[flow.target].device
        level = tables.levels[level_of(tables.levels, a, b)]
        flow.num_ports = put_ports(tables.levels, a, b, ports[f])
        flow.seconds = flow.nbytes * level.per_byte_s
        flow.latency_s = level.latency_s
        if flow.nbytes > 0:
            flow.send_s = charges.send_s + charges.send_byte_s * flow.nbytes
            flow.receive_s = charges.receive_s + charges.receive_byte_s * flow.nbytes
        flow.first = count
        count += flow.copies
    return count


@making
def _link(flows: Records, first: int, rest: int, end: int, sender: Any, receiver: Any) -> None:
    """Order the flows of each channel of an edge in one direction; those from ``rest`` on are of
    what is left behind the last whole unit.
    """
    senders = sender.end_lane - sender.first_lane
    receivers = receiver.end_lane - receiver.first_lane
    # Per channel the first and the last flow of a unit so far.
    head = np.full((senders, receivers), -1, np.int64)
    tail = np.full((senders, receivers), -1, np.int64)
    _order(flows, first, rest, sender, receiver, head, tail)
    for f in range(first, rest):
        flow = flows[f]
        a, b = flow.source - sender.first_lane, flow.target - receiver.first_lane
        if tail[a, b] == f:
            flow.next, flow.is_wrap = head[a, b], 1
            flows[head[a, b]].is_head = 1
    if rest == end:
        return
    head[:], tail[:] = -1, -1
    _order(flows, rest, end, sender, receiver, head, tail)
    for f in range(first, rest):
        flow = flows[f]
        if flow.is_wrap:
            a, b = flow.source - sender.first_lane, flow.target - receiver.first_lane
            flow.rest = head[a, b]
            tail[a, b] = -1
    for f in range(rest, end):
        flow = flows[f]
        a, b = flow.source - sender.first_lane, flow.target - receiver.first_lane
        # What follows whole units is no head.
        if head[a, b] == f and tail[a, b] >= 0:
            flow.is_head = 1


@compiled
def _order(
    flows: Records, first: int, end: int, sender: Any, receiver: Any, head: Ints, tail: Ints
) -> None:
    """Find ``same`` and ``next`` of each flow, without the way back to the head of a channel."""
    for f in range(first, end):
        flow = flows[f]
        a, b = flow.source - sender.first_lane, flow.target - receiver.first_lane
        flow.same = flow.next = flow.rest = -1
        before = tail[a, b]
        tail[a, b] = f
        if before < 0:
            head[a, b] = f
        elif flows[before].batch == flow.batch:
            flows[before].same = f
        else:
            flows[before].next = f


@compiled
def _post(flows: Records, first: int, end: int, slots: int, posted: Bools) -> None:
    """Post the receives of the first micro-batches of each channel."""
    for head in range(first, end):
        if not flows[head].is_head:
            continue
        f, copy, last = head, 0, head
        for _ in range(slots):
            while f >= 0:
                posted[flows[f].first + copy] = True
                last, f = f, flows[f].same
            f, copy = following(flows[last], copy)
            if f < 0:
                break


@compiled
def following(last: Any, copy: int) -> tuple[int, int]:
    """The first flow, or -1, and the copy of it, of the micro-batch that comes next in a channel;
    ``last`` is the last flow of the one before.
    """
    if not last.is_wrap:
        return last.next, copy
    if copy + 1 < last.copies:
        return last.next, copy + 1
    return last.rest, 0
