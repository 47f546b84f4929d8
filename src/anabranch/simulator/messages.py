"""Messages of a schedule as columns: what each costs, and when its receive is posted."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from anabranch.errors import InvalidScheduleError
from anabranch.plans.stages import StageGraph
from anabranch.schedule.check import Channel, channel
from anabranch.schedule.lower import directions, message_table
from anabranch.schedule.schedule import Schedule
from anabranch.simulator.costs import StepCosts
from anabranch.simulator.lists import COMPUTE, RECEIVES, SENDS, Ints, Lists, Positions, place

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Messages:
    """Every message, by index.

    Attributes:
        first: where its ports begin in ``ports``.
        stop: where they end.
        occupies_s: seconds that it occupies these ports.
        latency_s: seconds from then until it has arrived.
        end_s: seconds of each of the devices at both ends.
        opener: the message with which its receive is posted, -1 for none.
        is_posted: whether its receive is posted before anything has been received.
    """

    ports: Ints
    first: Ints
    stop: Ints
    occupies_s: Floats
    latency_s: Floats
    end_s: Floats
    opener: Ints
    is_posted: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.first)

    @staticmethod
    def joined(parts: Sequence[Messages]) -> Messages:
        """Concatenate messages."""
        sizes = [len(part) for part in parts]

        def before(lengths: Sequence[int]) -> Ints:
            return np.repeat(np.cumsum([0, *lengths])[:-1], sizes)

        columns = zip(*(vars(part).values() for part in parts), strict=True)
        whole = Messages(*(np.concatenate(column, axis=-1) for column in columns))
        ports, opener = before([len(part.ports) for part in parts]), whole.opener
        return replace(
            whole,
            first=whole.first + ports,
            stop=whole.stop + ports,
            opener=np.where(opener >= 0, opener + before(sizes), -1),
        )

    def repeated(self, count: int) -> Messages:
        """Repeat messages for a number of steps; receives are posted at once in the first step
        only.
        """
        later = np.arange(count)[:, None] * len(self)
        return replace(
            self,
            first=np.tile(self.first, count),
            stop=np.tile(self.stop, count),
            occupies_s=np.tile(self.occupies_s, count),
            latency_s=np.tile(self.latency_s, count),
            end_s=np.tile(self.end_s, count),
            opener=np.where(self.opener >= 0, self.opener + later, -1).ravel(),
            is_posted=np.append(self.is_posted, np.zeros((count - 1) * len(self), np.bool_)),
        )


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
    return Messages(
        np.array([port for route in routes for port in route.ports], np.int64),
        bounds[:-1][way],
        bounds[1:][way],
        nbytes * per_byte_s[way],
        latency_s[way],
        end_s[size],
        opener,
        opener < 0,
    )


def numbered(schedule: Schedule, costs: StepCosts, lists: Lists) -> Messages:
    """Number the messages of a lowered schedule by their receives, and list them."""
    received: dict[Channel, list[int]] = defaultdict(list)
    groups: dict[Channel, dict[int, list[int]]] = defaultdict(dict)
    found: list[tuple[float, ...]] = []
    for device, actions in schedule.actions.items():
        for action in actions:
            if action.kind.is_receive:
                key = source, target, a, b, forward = channel(action, device)
                received[key].append(len(found))
                groups[key].setdefault(action.microbatch, []).append(len(found))
                edge = (source, target) if forward else (target, source)
                nbytes = costs.message_bytes(*edge, action.stop - action.start)[not forward]
                found.append((a, b, nbytes))
    opener = np.full(len(found), -1)
    for microbatches in groups.values():
        of_channel = list(microbatches.values())
        for before, opened in zip(of_channel, of_channel[schedule.slots :], strict=False):
            opener[opened] = before[-1]
    left: dict[tuple[Channel, bool], Iterator[int]] = {}
    for d, (device, actions) in enumerate(schedule.actions.items()):
        at, entries = list[int](), list[int]()
        for position, action in enumerate(actions):
            if action.peer < 0:
                continue
            key, sends = channel(action, device), action.kind.is_send
            message = next(left.setdefault((key, sends), iter(received[key])), None)
            if message is None:
                raise InvalidScheduleError(f"device {device}: nobody receives {action}")
            at.append(position)
            entries.append(~message if sends else message)
        lists.put(d, place(np.array(at, np.int64), COMPUTE), np.array(entries, np.int64))
    sender, receiver, nbytes_of = np.array(found).reshape(-1, 3).T
    return _priced(costs, sender.astype(np.int64), receiver.astype(np.int64), nbytes_of, opener)


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
    edges = [_edge_messages(graph, costs, schedule.slots, *way) for way in ways]
    ends, parts = zip(*edges, strict=True)
    messages = Messages.joined(parts)
    a, i, b, j = np.concatenate(ends, axis=1)
    source, target, forward = np.repeat(ways, [*map(len, parts)], axis=0).T
    numbers, senders, receivers = np.arange(len(messages)), index[a], index[b]
    lists.put(senders, place(positions.of(senders, source, forward, i), SENDS), ~numbers)
    lists.put(receivers, place(positions.of(receivers, target, forward, j), RECEIVES), numbers)
    return messages


def _edge_messages(
    graph: StageGraph, costs: StepCosts, slots: int, source: int, target: int, forward: bool
) -> tuple[Ints, Messages]:
    """Return the messages of one stage edge after rows of senders, their micro-batches, and those
    of receivers; the costs cache them, as they are equal in many graphs.
    """
    edge = (source, target) if forward else (target, source)
    known = costs.kept(*edge)
    cuts = ((s.devices, s.microbatch_size) for s in (graph.stages[x] for x in edge))
    key = Messages, graph.batch_size, slots, forward, *cuts
    if key not in known:
        i, a, j, b, start, stop = message_table(graph, source, target, forward=forward)
        samples, size = np.unique(stop - start, return_inverse=True)
        nbytes = [costs.message_bytes(*edge, n)[not forward] for n in samples.tolist()]
        opener = _openers(a * (graph.devices[-1] + 1) + b, j, slots)
        messages = _priced(costs, a, b, np.array(nbytes, np.float64)[size], opener)
        known[key] = np.array([a, i, b, j]), messages
    found: tuple[Ints, Messages] = known[key]
    return found


def _openers(way: Ints, microbatch: Ints, slots: int) -> Ints:
    """Per message, with which one its receive is posted: when those of all but the latest ``slots``
    micro-batches on its way, its own included, have been taken; -1 for at once.
    """
    opener = np.full(len(way), -1)
    if not len(way):
        return opener
    order = np.argsort(way, kind="stable")
    way, microbatch = way[order], microbatch[order]
    begins = np.flatnonzero(np.diff(way, prepend=-1) | np.diff(microbatch, prepend=-1))
    last = np.append(begins[1:], len(way)) - 1
    # Of each micro-batch on a way, the one ``slots`` before it.
    before = np.full(len(begins), -1)
    if len(begins) > slots:
        on_way = way[begins[slots:]] == way[begins[:-slots]]
        before[slots:] = np.where(on_way, order[last[:-slots]], -1)
    opener[order] = np.repeat(before, last - begins + 1)
    return opener
