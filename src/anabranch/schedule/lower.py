"""Lowering: compute only -> with sends and receives.

What flows between two replicas is the intersection of what one makes and what the other needs.
Replicas hold equal slices of a micro-batch, so with 8 samples, stage 0 on one device in
micro-batches of 4, stage 1 on two devices in micro-batches of 8::

    stage 0, device 0   [ F0: 0 1 2 3 ][ F1: 4 5 6 7 ]
    stage 1, device 1   [ F0: 0 1 2 3 ]                      0SF0>1@1[0:4]
    stage 1, device 2                  [ F0: 4 5 6 7 ]       0SF1>1@2[4:8]

This one rule covers unequal replicas, unequal micro-batch sizes and a short last micro-batch.
Gradients of the same samples flow back. A replica whose slice is empty has no messages; its compute
stays in the list and costs nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

from anabranch.graph.opgraph import BATCH, OpGraph
from anabranch.planner.stages import StageGraph, split_evenly
from anabranch.schedule.schedule import Action, Kind, Schedule


class Message(NamedTuple):
    """Samples [start, stop) of one stage edge, between two devices."""

    source_microbatch: int
    source_device: int
    target_microbatch: int
    target_device: int
    start: int
    stop: int


def lower(
    schedule: Schedule,
    graph: StageGraph,
    *,
    gradient_edges: Collection[tuple[int, int]] | None = None,
    data_edges: Collection[tuple[int, int]] | None = None,
) -> Schedule:
    """Put in sends and receives: a receive right before the compute that needs it, a send right
    after its compute.

    Args:
        schedule: compute actions only.
        graph: stages, devices and sample intervals.
        gradient_edges: stage edges that carry gradients back; by default every edge that carries
            data.
        data_edges: stage edges that have messages at all; by default every one.

    Raises:
        ValueError: if the schedule has messages already.
    """
    if schedule.is_lowered:
        raise ValueError("the schedule has sends and receives already")
    before: dict[tuple[int, int, bool, int], list[Action]] = defaultdict(list)
    after: dict[tuple[int, int, bool, int], list[Action]] = defaultdict(list)
    for x, y in graph.edges:
        if data_edges is not None and (x, y) not in data_edges:
            continue
        back = gradient_edges is None or (x, y) in gradient_edges
        for i, a, j, b, start, stop in messages(graph, x, y):
            after[a, x, True, i].append(Action(x, Kind.SEND_FORWARD, i, y, b, start, stop))
            before[b, y, True, j].append(Action(y, Kind.RECEIVE_FORWARD, j, x, a, start, stop))
            if back:
                after[b, y, False, j].append(Action(y, Kind.SEND_BACKWARD, j, x, a, start, stop))
                before[a, x, False, i].append(
                    Action(x, Kind.RECEIVE_BACKWARD, i, y, b, start, stop)
                )
    lowered = {}
    for device, actions in schedule.actions.items():
        result: list[Action] = []
        for action in actions:
            # A weight gradient comes after its input gradient and has no messages of its own.
            if action.kind is Kind.WEIGHT_GRADIENT:
                result.append(action)
                continue
            key = device, action.stage, action.kind is Kind.FORWARD, action.microbatch
            result += before.get(key, ())
            result.append(action)
            result += after.get(key, ())
        lowered[device] = tuple(result)
    return Schedule(lowered, schedule.slots)


def messages(graph: StageGraph, x: int, y: int) -> Iterator[Message]:
    """What flows along stage edge x -> y, ascending; nothing between a device and itself."""
    made, needed = _slices(graph, x), _slices(graph, y)
    a = b = 0
    while a < len(made) and b < len(needed):
        (start_x, stop_x, i, source), (start_y, stop_y, j, target) = made[a], needed[b]
        start, stop = max(start_x, start_y), min(stop_x, stop_y)
        if start < stop and source != target:
            yield Message(i, source, j, target, start, stop)
        a, b = a + (stop_x <= stop_y), b + (stop_y <= stop_x)


def _slices(graph: StageGraph, stage: int) -> list[tuple[int, int, int, int]]:
    """(start, stop, micro-batch, device) of all that one stage holds; they tile the batch."""
    devices = graph.stages[stage].devices
    return [
        (start, stop, i, device)
        for i in range(graph.num_microbatches(stage))
        for device, (start, stop) in zip(
            devices, split_evenly(*graph.interval(stage, i), len(devices)), strict=True
        )
        if start < stop
    ]


def edge_values(graph: StageGraph, model: OpGraph) -> Mapping[tuple[int, int], tuple[int, ...]]:
    """Per pair of stages, the indices of the values that one makes and the other reads."""
    stage_of = {name: s for s, stage in enumerate(graph.stages) for name in stage.operators}
    owner = [stage_of[op.name] for op in model.ops]
    carried: dict[tuple[int, int], list[int]] = defaultdict(list)
    for index, value in enumerate(model.values):
        if value.producer == BATCH:
            continue
        source = owner[value.producer]
        for target in {owner[consumer] for consumer in value.consumers}:
            if target != source:
                carried[source, target].append(index)
    return {edge: tuple(values) for edge, values in sorted(carried.items())}


def data_and_gradient_edges(
    graph: StageGraph, model: OpGraph
) -> tuple[frozenset[tuple[int, int]], frozenset[tuple[int, int]]]:
    """The stage edges that carry messages forward, and those that carry messages back.

    A stage edge without a value is there to order two stages, as a pipeline that knows only chains
    does. It has messages of no bytes in both directions, so its stages wait for one another.
    """
    carried = edge_values(graph, model)
    order = set(graph.edges) - set(carried)
    gradients = {
        edge for edge, values in carried.items() if any(model.values[v].grad for v in values)
    }
    return frozenset(order | set(carried)), frozenset(order | gradients)
