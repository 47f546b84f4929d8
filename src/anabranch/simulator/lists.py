"""Lists of devices in a simulated step, as they are put together."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from anabranch.errors import InvalidScheduleError
from anabranch.plans.stages import StageGraph
from anabranch.schedule.schedule import Order, Schedule

Ints = NDArray[np.int64]

T = TypeVar("T", int, Ints)

RECEIVES, COMPUTE, SENDS, UPDATE = range(4)
"""Phases at a position of a list."""


def place(position: T, phase: T | int) -> T:
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
        """Put entries at these places, behind those that are there already; as NumPy broadcasts."""
        keys = self._begin[devices] + places
        self._keys.append(keys.ravel())
        self._values.append(np.broadcast_to(values, keys.shape).ravel())

    def joined(self) -> tuple[Ints, Ints]:
        """All entries, and where those of each device begin and end."""
        keys = np.concatenate(self._keys)
        order = np.argsort(keys, kind="stable")
        return np.concatenate(self._values)[order], np.searchsorted(keys[order], self._begin)


class Positions:
    """Positions of the passes of stages in the lists of devices, by number in the step.

    Args:
        orders: of each device.
        stages: number of stages.
    """

    def __init__(self, orders: Collection[Order], stages: int) -> None:
        different = {id(order): order for order in orders}  # replicas share one
        rows = {key: row for row, key in enumerate(different)}
        self._row = np.array([rows[id(order)] for order in orders])
        self._first = np.zeros((len(rows), stages, 2), np.int64)
        parts, count = [np.zeros(0, np.int64)], 0
        for row, order in enumerate(different.values()):
            for (stage, forward), positions in order.passes.items():
                self._first[row, stage, int(forward)] = count
                count += len(positions)
                parts.append(positions)
        self._found = np.concatenate(parts)

    def of(self, devices: Ints, stages: Ints, forward: Ints, microbatches: Ints) -> Ints:
        """Return the positions of passes of these micro-batches."""
        at: Ints = self._found[self._first[self._row[devices], stages, forward] + microbatches]
        return at


def require_in_order(schedule: Schedule, graph: StageGraph) -> None:
    """Raise an ``InvalidScheduleError`` unless every device takes all micro-batches of its stages
    in turn.
    """
    orders = schedule.orders
    counts = [order.counts for order in {id(o): o for o in orders.values()}.values()]
    whole = all(
        done is not None
        and all(count == graph.num_microbatches(stage) for (stage, _), count in done.items())
        for done in counts
    )
    if not whole or not all(
        device in orders and {(s, True), (s, False)} <= orders[device].passes.keys()
        for s, stage in enumerate(graph.stages)
        for device in stage.devices
    ):
        raise InvalidScheduleError(
            "a device lacks micro-batches of its stages, or takes them out of order, which has no "
            "step time; schedule.check.check says where"
        )
