"""Progress of devices through a schedule without messages, counted and not timed.

The messages of ``lower`` are right before and right after the computes that they belong to, so a
compute can run once the computes that it takes values or gradients from have run. Every stage runs
its micro-batches in order: counts of computes say all of it, and no message is made. A plan of
thousands of stages with tens of thousands of edges is checked in a fraction of a second.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from anabranch.plans.edges import EVERY_EDGE, MessageEdges
from anabranch.plans.stages import StageGraph
from anabranch.schedule.lower import directions, overlaps
from anabranch.schedule.schedule import Kind, Schedule

Lane = tuple[int, int, bool]
"""(stage, device, is forward): the computes of a replica in one direction."""
Source = tuple[Lane, Sequence[int]]
"""A lane that another takes from, and how many of its computes each compute of the other needs."""


def finishes(order: Schedule, graph: StageGraph, edges: MessageEdges = EVERY_EDGE) -> bool:
    """Return whether every device comes to its end, or False if devices wait for each other.

    Time is linear in stages and stage edges times micro-batches.

    Args:
        order: a schedule without messages that ``check_order`` has found valid.
        edges: stage edges with messages.
    """
    sources = _sources(graph, edges)
    done: dict[Lane, int] = defaultdict(int)
    waiting: dict[Lane, list[int]] = defaultdict(list)
    arrived: dict[int, list[int]] = defaultdict(list)  # stage -> devices at its next update
    positions = dict.fromkeys(order.actions, 0)
    runnable = list(order.actions)
    while runnable:
        device = runnable.pop()
        actions, at = order.actions[device], positions[device]
        while at < len(actions):
            action = actions[at]
            if action.kind.has_messages:
                lane, i = (action.stage, device, action.kind.is_forward), action.microbatch
                short = next((s for s, needs in sources.get(lane, ()) if done[s] < needs[i]), None)
                if short is not None:
                    waiting[short].append(device)
                    break
                done[lane] += 1
                runnable += waiting.pop(lane, ())
            at += 1
            if action.kind is Kind.UPDATE:
                # The last replica that arrives lets the others continue after the update.
                arrived[action.stage].append(device)
                if len(arrived[action.stage]) < graph.stages[action.stage].replicas:
                    break
                runnable += (other for other in arrived.pop(action.stage) if other != device)
        positions[device] = at
    return all(at == len(order.actions[device]) for device, at in positions.items())


def _sources(graph: StageGraph, edges: MessageEdges) -> dict[Lane, list[Source]]:
    """Return the lanes that each lane takes from."""
    tables: dict[tuple[int, ...], list[tuple[int, int, Sequence[int]]]] = {}
    result: dict[Lane, list[Source]] = defaultdict(list)
    for source, target, forward in directions(graph, edges):
        sending, receiving = graph.stages[source], graph.stages[target]
        cuts = (
            *(sending.microbatch_size, sending.replicas),
            *(receiving.microbatch_size, receiving.replicas),
        )
        if cuts not in tables:
            tables[cuts] = _needs(graph, source, target)
        for r, q, needs in tables[cuts]:
            lane = source, sending.devices[r], forward
            result[target, receiving.devices[q], forward].append((lane, needs))
    return result


def _needs(graph: StageGraph, source: int, target: int) -> list[tuple[int, int, Sequence[int]]]:
    """Return (replica of source, replica of target, computes of the one that each compute of the
    other needs)."""
    count = graph.num_microbatches(target)
    x, y = graph.stages[source], graph.stages[target]
    if x.replicas == y.replicas == 1 and x.microbatch_size == y.microbatch_size:
        return [(0, 0, range(1, count + 1))]
    result: dict[tuple[int, int], list[int]] = defaultdict(lambda: [0] * count)
    for overlap in overlaps(graph, source, target):
        replicas = overlap.source_replica, overlap.target_replica
        result[replicas][overlap.target_microbatch] = overlap.source_microbatch + 1
    return [(r, q, needs) for (r, q), needs in result.items()]
