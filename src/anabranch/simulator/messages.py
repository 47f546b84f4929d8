"""Messages of a schedule as a table: what each costs, and when its receive is posted."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np

from anabranch.compiled import Floats, Ints, Table, record_type, records
from anabranch.cost.communication import Route
from anabranch.plans.stages import StageGraph
from anabranch.schedule.lower import directions, message_table
from anabranch.schedule.schedule import Order, Schedule
from anabranch.simulator.costs import StepCosts
from anabranch.simulator.records import MessageRecord

T = TypeVar("T", int, Ints)

RECEIVES, COMPUTE, SENDS, UPDATE = range(4)
"""Phases at one position of a list, in their order."""


def insertion_point(position: T, phase: T | int) -> T:
    """Return the insertion point of a phase at a position; position -1 is before the whole list."""
    return 4 * (position + 1) + phase


class Lists:
    """Lists of devices that are made by putting entries at points of an original list.

    Args:
        lengths: lengths of the original lists; there are points before and behind each.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        self._begin = 4 * np.cumsum([0, *(length + 2 for length in lengths)])
        self._keys: list[Ints] = []
        self._values: list[Ints] = []

    def put(self, devices: Ints | int, points: Ints, values: Ints) -> None:
        """Put entries at points, behind entries already there; arguments broadcast as in NumPy."""
        keys = self._begin[devices] + points
        self._keys.append(keys.ravel())
        self._values.append(np.broadcast_to(values, keys.shape).ravel())

    def joined(self) -> tuple[Ints, Ints]:
        """Return all entries, and the start of each device's entries with the end of the last."""
        keys = np.concatenate(self._keys)
        order = np.argsort(keys, kind="stable")
        return np.concatenate(self._values)[order], np.searchsorted(keys[order], self._begin)


class Positions:
    """Positions of the passes of each stage in the lists of devices.

    Args:
        orders: order of each device.
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
        self._positions = np.concatenate(parts)

    def of(self, devices: Ints, stages: Ints, forward: Ints, microbatches: Ints) -> Ints:
        """Return the positions of passes of these micro-batches."""
        at: Ints = self._positions[self._first[self._row[devices], stages, forward] + microbatches]
        return at


@dataclass(frozen=True)
class Messages:
    """Every message of a step before its clock runs.

    Attributes:
        table: one row per message; ``first`` and ``stop`` are indices in ``ports``.
    """

    table: Table[MessageRecord]
    ports: Ints

    def __len__(self) -> int:
        return len(self.table)

    def repeated(self, count: int) -> Messages:
        """Repeat messages for several steps; receives are posted at once in the first step only."""
        table = concatenated([self.table] * count)
        later = np.repeat(np.arange(count) * len(self), len(self))
        table["opener"] += np.where(table["opener"] >= 0, later, 0)
        table["ready"][len(self) :] = 0
        return Messages(table, self.ports)


def concatenated(tables: Sequence[Table[MessageRecord]]) -> Table[MessageRecord]:
    """Return a copy of the tables in one; as whole numbers, which NumPy copies faster."""
    numbers = np.concatenate([np.asarray(table).view(np.int64) for table in tables])
    rows: Any = numbers.view(record_type(MessageRecord))
    return cast("Table[MessageRecord]", rows.view(np.recarray))


class Transfers(NamedTuple):
    """Messages of a stage graph under any schedule, stage edge after stage edge.

    Attributes:
        ends: three rows with a column per message: sending stage, receiving stage, 1 for forward.
        table: columns of ``message_table``.
        nbytes: bytes of each message.
        occupies: seconds in which each message occupies its ports.
        order: numbers of the messages, sorted by channel: a stage edge between two devices.
        first: start in ``order`` of the messages of each channel.
        routes: route of each channel.
    """

    ends: Ints
    table: Ints
    nbytes: Floats
    occupies: Floats
    order: Ints
    first: Ints
    routes: list[Route]


def transfers_of(graph: StageGraph, costs: StepCosts) -> Transfers:
    ways = [*directions(graph, costs.message_edges)]
    tables = [message_table(graph, s, t, forward=forward) for s, t, forward in ways]
    way = np.repeat(np.arange(len(ways)), np.array([part.shape[1] for part in tables], np.int64))
    table = np.concatenate([np.zeros((6, 0), np.int64), *tables], axis=1)
    _, sender, _, receiver, start, stop = table
    most = 1 + int((stop - start).max(initial=0))
    kinds, kind = np.unique(way * most + stop - start, return_inverse=True)
    sizes = [_message_bytes(costs, ways[n // most], n % most) for n in kinds.tolist()]
    nbytes = np.array(sizes, np.float64)[kind]
    count = 1 + int(table[[1, 3]].max(initial=0))
    channel = (way * count + sender) * count + receiver
    order = np.argsort(channel, kind="stable")
    first = np.flatnonzero(np.diff(channel[order], prepend=-1))
    devices = zip(sender[order[first]].tolist(), receiver[order[first]].tolist(), strict=True)
    routes = [costs.route(a, b) for a, b in devices]
    per_byte_s = np.array([route.per_byte_s for route in routes], np.float64)
    occupies = nbytes.copy()
    occupies[order] *= np.repeat(per_byte_s, np.diff(first, append=len(order)))
    ends = np.array(ways, np.int64).reshape(-1, 3)[way].T
    return Transfers(ends, table, nbytes, occupies, order, first, routes)


def port_seconds(costs: StepCosts, graph: StageGraph) -> Mapping[int, float]:
    """Sum the seconds that messages and all-reduces of a step occupy each port."""
    transfers, carried = transfers_of(graph, costs), defaultdict[int, float](float)
    summed = np.add.reduceat(transfers.occupies[transfers.order], transfers.first)
    for route, seconds in zip(transfers.routes, summed.tolist(), strict=True):
        for port in route.ports:
            carried[port] += seconds
    for work in costs.all_reduces():
        seconds = work.seconds
        for port in work.ports:
            carried[port] += seconds
    return carried


def put_in(schedule: Schedule, graph: StageGraph, costs: StepCosts, lists: Lists) -> Messages:
    """Number the messages that ``lower`` would insert, and put them into the lists of devices:
    receives before their computes, sends behind.
    """
    index = np.zeros(max(*graph.devices, *schedule.actions) + 1, np.int64)
    index[[*schedule.actions]] = np.arange(len(schedule.actions))
    positions = Positions(schedule.orders.values(), len(graph))
    transfers = transfers_of(graph, costs)
    (source, target, forward), (i, a, j, b, *_) = transfers.ends, transfers.table
    numbers, senders, receivers = np.arange(len(i)), index[a], index[b]
    lists.put(senders, insertion_point(positions.of(senders, source, forward, i), SENDS), ~numbers)
    lists.put(
        receivers, insertion_point(positions.of(receivers, target, forward, j), RECEIVES), numbers
    )
    return _priced(costs, transfers)


def _priced(costs: StepCosts, transfers: Transfers) -> Messages:
    """Price messages and link each to the one after which its receive is posted."""
    order, first, routes = transfers.order, transfers.first, transfers.routes
    lengths = np.diff(first, append=len(order))
    bounds = np.array([0, *accumulate(len(route.ports) for route in routes)])
    latency_s = np.array([route.latency_s for route in routes], np.float64)
    opener = np.full(len(order), -1)
    channel = np.repeat(np.arange(len(first)), lengths)
    opener[order] = _openers(channel, transfers.table[2, order], order)
    messages = records(MessageRecord, len(order))
    messages["first"][order] = bounds[:-1][channel]
    messages["stop"][order] = bounds[1:][channel]
    messages["latency"][order] = latency_s[channel]
    messages["occupies"] = transfers.occupies
    messages["end"] = costs.overheads.message_s * (transfers.nbytes > 0)
    messages["opener"], messages["ready"], messages["waiter"] = opener, opener < 0, -1
    messages["arrival"] = math.inf
    return Messages(messages, np.array([port for r in routes for port in r.ports], np.int64))


def _message_bytes(costs: StepCosts, way: tuple[int, int, bool], samples: int) -> float:
    """Return the bytes of a message between stages, of activations or gradients."""
    source, target, forward = way
    edge = (source, target) if forward else (target, source)
    return float(costs.message_bytes(*edge, samples)[not forward])


def _openers(channel: Ints, microbatch: Ints, number: Ints) -> Ints:
    """Return the message after which each receive is posted: the last of the micro-batch before it
    in its channel, or -1 for at once. Messages are sorted by channel.
    """
    if not len(channel):
        return channel
    begins = np.flatnonzero(np.diff(channel, prepend=-1) | np.diff(microbatch, prepend=-1))
    before = np.full(len(begins), -1)
    before[1:] = np.where(channel[begins[1:]] == channel[begins[:-1]], number[begins[1:] - 1], -1)
    return np.repeat(before, np.diff(begins, append=len(channel)))
