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

from collections.abc import Sequence

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
    return _Merger(graph, orders).run()


class _Merger:
    """The state of the merge: finished computes, free times of devices, and next actions."""

    def __init__(self, graph: StageGraph, orders: Sequence[tuple[Action, ...]]) -> None:
        self._graph, self._orders = graph, orders
        self._needs = needs(graph)
        self._done: dict[Compute, float] = {}
        self._free: dict[int, float] = dict.fromkeys(graph.devices, 0.0)
        self._lists: dict[int, list[Action]] = {device: [] for device in graph.devices}
        self._next = {(s, d): 0 for s, stage in enumerate(graph.stages) for d in stage.devices}

    def run(self) -> dict[int, tuple[Action, ...]]:
        left = sum(len(self._orders[s]) for s, _ in self._next)
        while left:
            choices = [choice for lane in self._next if (choice := self._choice(*lane))]
            if not choices:
                raise InvalidScheduleError(
                    "the stages' orders wait for each other; in-flight counts must not rise along "
                    "a stage edge"
                )
            start, _, _, _, device, action = min(choices, key=lambda choice: choice[:5])
            end = start + self._length(action, device)
            if action.kind.has_messages:
                self._done[compute_of(action, device)] = end
            self._free[device] = end
            self._lists[device].append(action)
            self._next[action.stage, device] += 1
            left -= 1
        return {device: tuple(actions) for device, actions in self._lists.items()}

    def _choice(self, stage: int, device: int) -> tuple[float, bool, int, int, int, Action] | None:
        """Return the start time of a stage's next action, then the keys that break ties."""
        position = self._next[stage, device]
        if position == len(self._orders[stage]):
            return None
        action = self._orders[stage][position]
        compute = compute_of(action, device)
        awaited = self._needs.get(compute, ()) if action.kind.has_messages else ()
        if any(needed not in self._done for needed in awaited):
            return None
        start = max([self._free[device], *(self._done[needed] for needed in awaited)])
        forward = action.kind.is_forward
        first = self._graph.interval(stage, action.microbatch)[0]
        return start, forward, first, -stage, device, action

    def _length(self, action: Action, device: int) -> float:
        replica = self._graph.stages[action.stage].devices.index(device)
        start, stop = self._graph.slice(action.stage, action.microbatch, replica)
        return (stop - start) * (2.0 if action.kind is Kind.BACKWARD else 1.0)
