"""Lowering: sends and receives are inserted between the computes of a schedule.

A message between two replicas has the samples that one computes and the other needs. Replicas hold
equal slices of a micro-batch. So with 8 samples, stage 0 on one device in micro-batches of 4, and
stage 1 on two devices in micro-batches of 8::

    stage 0, device 0   [ F0: 0 1 2 3 ][ F1: 4 5 6 7 ]
    stage 1, device 1   [ F0: 0 1 2 3 ]                      0SF0>1@1[0:4]
    stage 1, device 2                  [ F0: 4 5 6 7 ]       0SF1>1@2[4:8]

This one rule covers unequal replicas, unequal micro-batch sizes and a short last micro-batch.
Gradients of the same samples flow back. A replica whose slice is empty has no messages; its compute
stays in the list and costs nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from anabranch.plans.edges import EVERY_EDGE, MessageEdges
from anabranch.plans.stages import StageGraph, part_of
from anabranch.schedule.schedule import Action, Kind, Schedule

if TYPE_CHECKING:
    from anabranch.compiled import Ints


ComputeKey = tuple[int, int, bool, int]
"""(stage, device, is forward, micro-batch)."""


def compute_of(action: Action, device: int) -> ComputeKey:
    return action.stage, device, action.kind.is_forward, action.microbatch


class Message(NamedTuple):
    """Activations or gradients of samples [start, stop), sent from a device to another."""

    sent_microbatch: int
    sender: int
    received_microbatch: int
    receiver: int
    start: int
    stop: int


def lower(schedule: Schedule, graph: StageGraph, edges: MessageEdges = EVERY_EDGE) -> Schedule:
    """Insert each receive right before the compute that needs it and each send right after its
    compute.

    Raises:
        ValueError: if the schedule has messages already.
    """
    if schedule.is_lowered:
        raise ValueError("the schedule has sends and receives already")
    before: dict[ComputeKey, list[Action]] = defaultdict(list)
    after: dict[ComputeKey, list[Action]] = defaultdict(list)
    for source, target, forward in directions(graph, edges):
        send = Kind.SEND_FORWARD if forward else Kind.SEND_BACKWARD
        receive = Kind.RECEIVE_FORWARD if forward else Kind.RECEIVE_BACKWARD
        for i, a, j, b, start, stop in messages(graph, source, target, forward=forward):
            after[source, a, forward, i].append(Action(source, send, i, target, b, start, stop))
            before[target, b, forward, j].append(Action(target, receive, j, source, a, start, stop))
    lowered = {}
    for device, actions in schedule.actions.items():
        result: list[Action] = []
        for action in actions:
            key = compute_of(action, device)
            has_messages = action.kind.has_messages
            result += before.get(key, ()) if has_messages else ()
            result.append(action)
            result += after.get(key, ()) if has_messages else ()
        lowered[device] = tuple(result)
    return Schedule(lowered)


def directions(
    graph: StageGraph, edges: MessageEdges = EVERY_EDGE
) -> Iterator[tuple[int, int, bool]]:
    """Generate (sending stage, receiving stage, is forward) for edges with messages."""
    for x, y in graph.edges:
        if edges.goes_forward((x, y)):
            yield x, y, True
        if edges.comes_back((x, y)):
            yield y, x, False


def messages(
    graph: StageGraph,
    source: int,
    target: int,
    *,
    forward: bool = True,
    inside_devices: bool = False,
) -> Iterator[Message]:
    """Generate the messages from one stage to another, by ascending samples.

    Args:
        inside_devices: generate samples that a device keeps for its other stage, without a message.
    """
    table = message_table(graph, source, target, forward=forward, inside_devices=inside_devices)
    return map(Message._make, table.T.tolist())


def message_table(
    graph: StageGraph, source: int, target: int, *, forward: bool, inside_devices: bool = False
) -> Ints:
    """Return ``messages`` as an array with one row per field of ``Message``."""
    table = transfer_table(graph, source, target, forward=forward)
    if not (inside_devices or graph.shares_devices):
        return table
    _, sender, _, receiver, *_ = table
    return table[:, (sender == receiver) == inside_devices]


def needs(
    graph: StageGraph, edges: MessageEdges = EVERY_EDGE, *, inside_devices: bool = False
) -> Mapping[ComputeKey, list[ComputeKey]]:
    """Map each compute to the computes of other stages whose values or gradients it takes.

    Args:
        inside_devices: only computes on the same device, which need no message.
    """
    result: dict[ComputeKey, list[ComputeKey]] = defaultdict(list)
    if inside_devices and not graph.shares_devices:
        return result
    for source, target, forward in directions(graph, edges):
        ends = graph.stages[source].devices, graph.stages[target].devices
        if inside_devices and set(ends[0]).isdisjoint(ends[1]):
            continue
        table = transfer_table(graph, source, target, forward=forward)
        if inside_devices:
            table = table[:, table[1] == table[3]]
        for i, a, j, b, *_ in table.T.tolist():
            result[target, b, forward, j].append((source, a, forward, i))
    return result


def transfer_table(graph: StageGraph, source: int, target: int, *, forward: bool) -> Ints:
    """Return ``message_table`` with samples that stay on their device, too."""
    import numpy as np

    sending, receiving = graph.stages[source], graph.stages[target]
    first, second = (sending, receiving) if forward else (receiving, sending)
    cuts = first.microbatch_size, first.replicas, second.microbatch_size, second.replicas
    i, r, j, q, start, stop = _overlap_table(graph.batch_size, *cuts)
    if not forward:
        i, r, j, q = j, q, i, r
    senders, receivers = np.array(sending.devices)[r], np.array(receiving.devices)[q]
    return np.array([i, senders, j, receivers, start, stop])


@lru_cache(maxsize=64)
def _overlap_table(batch_size: int, b_x: int, d_x: int, b_y: int, d_y: int) -> Ints:
    """Return the samples [start, stop) that a replica of a stage x computes and one of a stage y
    needs, ascending: rows of micro-batch and replica of x, those of y, start and stop.

    Stages x and y have micro-batches of b_x and b_y samples on d_x and d_y replicas.
    """
    import numpy as np

    (made, i, r), (needed, j, q) = _slices(b_x, d_x, batch_size), _slices(b_y, d_y, batch_size)
    # Not np.union1d, whose first call in a process loads masked arrays, a twentieth of a second.
    starts = np.array(sorted({*made.tolist(), *needed.tolist()}), np.int64)
    x, y = (np.searchsorted(begun, starts, side="right") - 1 for begun in (made, needed))
    return np.array([i[x], r[x], j[y], q[y], starts, np.append(starts[1:], batch_size)])


def _slices(size: int, replicas: int, samples: int) -> tuple[Ints, Ints, Ints]:
    """Return start, micro-batch and replica of the non-empty slices of ``samples`` samples."""
    import numpy as np

    first = np.arange(0, samples, size)[:, None]
    start, stop = part_of(first, np.minimum(first + size, samples), replicas, np.arange(replicas))
    microbatch, replica = np.nonzero(start < stop)
    return start[microbatch, replica], microbatch, replica
