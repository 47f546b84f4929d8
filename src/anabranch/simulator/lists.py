"""Lists of devices in a simulated step, as they are put together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from anabranch.plans.stages import StageGraph
from anabranch.schedule.schedule import Kind, Schedule

Ints = NDArray[np.int64]

T = TypeVar("T", int, Ints)

RECEIVES, COMPUTE, SENDS, UPDATE = range(4)
"""Phases at a position of a list."""


def place(position: T, phase: int) -> T:
    """A place in the list of a device; position -1 is before all that the list has."""
    return 4 * (position + 1) + phase


class Lists:
    """Lists of devices with something at places of an original list.

    Args:
        lengths: of the original lists; before each and behind it is room for more.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        self._begin = 4 * np.cumsum([0, *(length + 2 for length in lengths)])
        self._keys: list[Ints] = []
        self._values: list[Ints] = []

    def put(self, devices: Ints | int, places: Ints, values: Ints) -> None:
        """Put entries at these places, behind those that are there already."""
        self._keys.append(self._begin[devices] + places)
        self._values.append(values)

    def joined(self) -> tuple[Ints, Ints]:
        """All entries, and where those of each device begin and end."""
        keys = np.concatenate(self._keys)
        order = np.argsort(keys, kind="stable")
        return np.concatenate(self._values)[order], np.searchsorted(keys[order], self._begin)


class Passes:
    """What the lists of a schedule have, each looked at once: replicas share one."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._lists = {id(actions): actions for actions in schedule.actions.values()}
        # Per list, stage and whether it is a forward: positions of computes that have messages.
        self._at: dict[int, dict[tuple[int, bool], list[int]]] = {}
        for key, actions in self._lists.items():
            found: dict[tuple[int, bool], list[int]] = defaultdict(list)
            for position, action in enumerate(actions):
                if action.kind.has_messages:
                    found[action.stage, action.kind.is_forward].append(position)
            self._at[key] = found

    def stages(self, device: int) -> tuple[int, ...]:
        """Of a device, ascending."""
        return tuple(sorted({stage for stage, _ in self._at[id(self._schedule.actions[device])]}))

    def positions(
        self, graph: StageGraph, stage: int, forward: bool, devices: Ints, microbatches: Ints
    ) -> Ints:
        """Where these devices have these micro-batches of a stage."""
        lists = {
            device: id(self._schedule.actions[device]) for device in graph.stages[stage].devices
        }
        rows = {listed: row for row, listed in enumerate(dict.fromkeys(lists.values()))}
        found = np.array([self._at[listed][stage, forward] for listed in rows])
        row_of = np.zeros(max(lists) + 1, np.int64)
        row_of[list(lists)] = [rows[listed] for listed in lists.values()]
        at: Ints = found[row_of[devices], microbatches]
        return at

    def are_in_order(self, graph: StageGraph) -> bool:
        """Whether every stage takes all of its micro-batches in turn; by hand it may not."""
        whole: dict[int, Collection[tuple[int, Kind]]] = {}
        for key, actions in self._lists.items():
            done: dict[tuple[int, Kind], int] = defaultdict(int)
            for action in actions:
                if action.microbatch != done[action.stage, action.kind]:
                    return False
                done[action.stage, action.kind] += 1
            if any(count != graph.num_microbatches(stage) for (stage, _), count in done.items()):
                return False
            whole[key] = done
        # What misses a stage, or a direction of it, is a list by hand as well.
        for s, stage in enumerate(graph.stages):
            for device in stage.devices:
                done_there = whole.get(id(self._schedule.actions.get(device)), ())
                kinds = {kind for other, kind in done_there if other == s}
                if Kind.FORWARD not in kinds or kinds.isdisjoint(
                    {Kind.BACKWARD, Kind.INPUT_GRADIENT}
                ):
                    return False
        return True
