"""Messages of a schedule as a table: what each costs, and when its receive is posted."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from anabranch.compiled import Table, record_type, records
from anabranch.errors import InvalidScheduleError
from anabranch.plans.stages import StageGraph
from anabranch.schedule.lower import directions, message_table
from anabranch.schedule.schedule import Order, Schedule
from anabranch.simulator.costs import StepCosts
from anabranch.simulator.records import MessageRecord

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


Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Messages:
    """Every message of a step before its clock runs.

    Attributes:
        table: by index; ``first`` and ``stop`` are places in ``ports``.
    """

    table: Table[MessageRecord]
    ports: Ints

    def __len__(self) -> int:
        return len(self.table)

    @staticmethod
    def joined(parts: Sequence[Messages]) -> Messages:
        """Concatenate messages."""
        sizes = [len(part) for part in parts]

        def before(lengths: Sequence[int]) -> Ints:
            return np.repeat(np.cumsum([0, *lengths])[:-1], sizes)

        table = concatenated([part.table for part in parts])
        ports = before([len(part.ports) for part in parts])
        table["first"] += ports
        table["stop"] += ports
        table["opener"] += np.where(table["opener"] >= 0, before(sizes), 0)
        return Messages(table, np.concatenate([part.ports for part in parts]))

    def repeated(self, count: int) -> Messages:
        """Repeat messages for a number of steps; receives are posted at once in the first step
        only.
        """
        table = concatenated([self.table] * count)
        later = np.repeat(np.arange(count) * len(self), len(self))
        table["opener"] += np.where(table["opener"] >= 0, later, 0)
        table["ready"][len(self) :] = 0
        return Messages(table, self.ports)


def concatenated(tables: Sequence[Table[MessageRecord]]) -> Table[MessageRecord]:
    """A copy of these tables behind one another; as whole numbers, which NumPy copies faster."""
    numbers = np.concatenate([np.asarray(table).view(np.int64) for table in tables])
    rows: Any = numbers.view(record_type(MessageRecord))
    return cast("Table[MessageRecord]", rows.view(np.recarray))


def _priced(
    costs: StepCosts, sender: Ints, receiver: Ints, nbytes: Floats, opener: Ints
) -> Messages:
    """Messages by these columns."""
    count = 1 + int(max(sender.max(initial=0), receiver.max(initial=0)))
    pairs, way = np.unique(sender * count + receiver, return_inverse=True)
    ends = zip(*(side.tolist() for side in divmod(pairs, count)), strict=True)
    routes = [costs.route(a, b) for a, b in ends]
    per_byte_s, latency_s = np.array([route[:2] for route in routes]).reshape(-1, 2).T
    sizes, size = np.unique(nbytes, return_inverse=True)
    end_s = np.array([costs.message_s(float(n)) for n in sizes])
    bounds = np.array([0, *accumulate(len(route.ports) for route in routes)])
    table = records(MessageRecord, len(opener))
    table["first"], table["stop"] = bounds[:-1][way], bounds[1:][way]
    table["occupies"], table["latency"] = nbytes * per_byte_s[way], latency_s[way]
    table["end"], table["arrival"] = end_s[size], math.inf
    table["opener"], table["ready"], table["waiter"] = opener, opener < 0, -1
    return Messages(table, np.array([port for r in routes for port in r.ports], np.int64))


def put_in(schedule: Schedule, graph: StageGraph, costs: StepCosts, lists: Lists) -> Messages:
    """Number the messages that ``lower`` would put in, those of each stage edge in a row, and list
    them before and behind the computes.
    """
    index = np.zeros(max(*graph.devices, *schedule.actions) + 1, np.int64)
    index[[*schedule.actions]] = np.arange(len(schedule.actions))
    positions = Positions(schedule.orders.values(), len(graph))
    ways = [*directions(graph, costs.message_edges)]
    if not ways:
        nothing = np.zeros(0, np.int64)
        return _priced(costs, nothing, nothing, np.zeros(0), nothing)
    edges = [_edge_messages(graph, costs, *way) for way in ways]
    ends, parts = zip(*edges, strict=True)
    messages = Messages.joined(parts)
    a, i, b, j = np.concatenate(ends, axis=1)
    source, target, forward = np.repeat(ways, [*map(len, parts)], axis=0).T
    numbers, senders, receivers = np.arange(len(messages)), index[a], index[b]
    lists.put(senders, place(positions.of(senders, source, forward, i), SENDS), ~numbers)
    lists.put(receivers, place(positions.of(receivers, target, forward, j), RECEIVES), numbers)
    return messages


def _edge_messages(
    graph: StageGraph, costs: StepCosts, source: int, target: int, forward: bool
) -> tuple[Ints, Messages]:
    """Return the messages of one stage edge after rows of senders, their micro-batches, and those
    of receivers.
    """
    edge = (source, target) if forward else (target, source)
    i, a, j, b, start, stop = message_table(graph, source, target, forward=forward)
    samples, size = np.unique(stop - start, return_inverse=True)
    nbytes = [costs.message_bytes(*edge, n)[not forward] for n in samples.tolist()]
    opener = _openers(a * (graph.devices[-1] + 1) + b, j)
    return np.array([a, i, b, j]), _priced(costs, a, b, np.array(nbytes, np.float64)[size], opener)


def _openers(way: Ints, microbatch: Ints) -> Ints:
    """Per message, with which one its receive is posted: the last of the micro-batch before it on
    its way; -1 for at once.
    """
    opener = np.full(len(way), -1)
    if not len(way):
        return opener
    order = np.argsort(way, kind="stable")
    way, microbatch = way[order], microbatch[order]
    begins = np.flatnonzero(np.diff(way, prepend=-1) | np.diff(microbatch, prepend=-1))
    last = np.append(begins[1:], len(way)) - 1
    before = np.full(len(begins), -1)
    before[1:] = np.where(way[begins[1:]] == way[begins[:-1]], order[last[:-1]], -1)
    opener[order] = np.repeat(before, last - begins + 1)
    return opener
