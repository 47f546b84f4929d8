"""Messages of a schedule as a table: what each costs, and when its receive is posted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from anabranch.compiled import Table, record_type, records
from anabranch.plans.stages import StageGraph
from anabranch.schedule.lower import directions, message_table
from anabranch.schedule.schedule import Schedule
from anabranch.simulator.costs import StepCosts
from anabranch.simulator.lists import RECEIVES, SENDS, Ints, Lists, Positions, place
from anabranch.simulator.records import MessageRecord

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
    of receivers; the costs cache them, as they are equal in many graphs.
    """
    edge = (source, target) if forward else (target, source)
    known = costs.kept(*edge)
    cuts = ((s.devices, s.microbatch_size) for s in (graph.stages[x] for x in edge))
    key = Messages, graph.batch_size, forward, *cuts
    if key not in known:
        i, a, j, b, start, stop = message_table(graph, source, target, forward=forward)
        samples, size = np.unique(stop - start, return_inverse=True)
        nbytes = [costs.message_bytes(*edge, n)[not forward] for n in samples.tolist()]
        opener = _openers(a * (graph.devices[-1] + 1) + b, j)
        messages = _priced(costs, a, b, np.array(nbytes, np.float64)[size], opener)
        known[key] = np.array([a, i, b, j]), messages
    result: tuple[Ints, Messages] = known[key]
    return result


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
