"""Interleaving: the orders of several stages on one device, merged into one list per device.

A schedule rule orders the micro-batches of a stage, but not the turns of two stages on one device.
The merge simulates the orders once; each device picks the action that can start first. A forward
takes time in proportion to its samples, a backward twice that, and each half of a split backward as
long as a forward. Two devices with two stages each, in a chain 0, 1, 2, 3, two micro-batches::

    device 0: stages 0, 2     0F0 0F1 2F0 2F1 .   .       2B0    2B1       0B0   0B1
    device 1: stages 1, 3     .   1F0 1F1 3F0 3B0    3F1  3B1     1B0    1B1

Among actions that can start at the same time backwards come first, because they free memory, then
earlier samples, then stages further down.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush

from anabranch.errors import InvalidScheduleError
from anabranch.plans.stages import StageGraph
from anabranch.schedule.lower import Compute, compute_of, needs
from anabranch.schedule.schedule import Action, Kind


def interleave(
    graph: StageGraph, orders: Sequence[tuple[Action, ...]]
) -> dict[int, tuple[Action, ...]]:
    """Merge the orders of stages into one list of compute actions per device.

    Raises:
        InvalidScheduleError: if the orders cannot be executed at all.
    """
    needed, done = needs(graph), dict[Compute, float]()  # done: when
    free = dict.fromkeys(graph.devices, 0.0)
    lists: dict[int, list[Action]] = {device: [] for device in graph.devices}
    position = {(s, d): 0 for s, stage in enumerate(graph.stages) for d in stage.devices}
    waiting: dict[Compute, list[tuple[int, int]]] = defaultdict(list)

    def choices(lanes: Iterable[tuple[int, int]]) -> Iterator[tuple[float, bool, int, int, int]]:
        """Next actions that can start: when, the keys that break ties, and the device."""
        for stage, device in lanes:
            if position[stage, device] == len(orders[stage]):
                continue
            action = orders[stage][position[stage, device]]
            key = compute_of(action, device)
            awaited = needed.get(key, ()) if action.kind.has_messages else ()
            missing = next((compute for compute in awaited if compute not in done), None)
            if missing is not None:
                waiting[missing].append((stage, device))
                continue
            start = max([free[device], *(done[compute] for compute in awaited)])
            first = graph.interval(stage, action.microbatch)[0]
            yield start, action.kind.is_forward, first, -stage, device

    # A device that has become busy since makes a start later, never earlier.
    ready = list(choices(position))
    heapify(ready)
    while ready:
        start, forward, first, stage, device = heappop(ready)
        if start < free[device]:
            heappush(ready, (free[device], forward, first, stage, device))
            continue
        action = orders[-stage][position[-stage, device]]
        replica = graph.stages[action.stage].devices.index(device)
        begun, ended = graph.slice(action.stage, action.microbatch, replica)
        free[device] = start + (ended - begun) * (2.0 if action.kind is Kind.BACKWARD else 1.0)
        lists[device].append(action)
        position[action.stage, device] += 1
        lanes = [(action.stage, device)]
        if action.kind.has_messages:
            done[compute_of(action, device)] = free[device]
            lanes += waiting.pop(compute_of(action, device), ())
        for choice in choices(lanes):
            heappush(ready, choice)
    if any(at < len(orders[stage]) for (stage, _), at in position.items()):
        raise InvalidScheduleError(
            "the stages' orders wait for each other; in-flight counts must not rise along a "
            "stage edge"
        )
    return {device: tuple(actions) for device, actions in lists.items()}
