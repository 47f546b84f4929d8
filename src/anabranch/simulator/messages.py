"""Messages of a schedule as columns: what each costs, and when its receive is posted."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from anabranch.errors import InvalidScheduleError
from anabranch.plans.stages import StageGraph
from anabranch.remembered import remembered
from anabranch.schedule.check import Channel, channel
from anabranch.schedule.lower import directions, message_table
from anabranch.schedule.schedule import Schedule
from anabranch.simulator.costs import StepCosts
from anabranch.simulator.lists import COMPUTE, RECEIVES, SENDS, Ints, Lists, Passes, place

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Messages:
    """Every message, by index.

    Attributes:
        way: from which device to which it goes, an index into ``ways``.
        ways: the ports on each.
        occupies_s: seconds that it occupies these ports.
        latency_s: seconds from then until it has arrived.
        ends_s: seconds of the devices at both ends, its sender's in row 0.
        opener: the message with which its receive is posted, -1 for none.
        is_posted: whether its receive is posted before anything has been received.
    """

    way: Ints
    ways: Sequence[tuple[int, ...]]
    occupies_s: Floats
    latency_s: Floats
    ends_s: Floats
    opener: Ints
    is_posted: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.way)

    def repeated(self, count: int) -> Messages:
        """Those of so many steps; only of the first one any receive is posted at once."""
        later = np.arange(count)[:, None] * len(self)
        return replace(
            self,
            way=np.tile(self.way, count),
            occupies_s=np.tile(self.occupies_s, count),
            latency_s=np.tile(self.latency_s, count),
            ends_s=np.tile(self.ends_s, count),
            opener=np.where(self.opener >= 0, self.opener + later, -1).ravel(),
            is_posted=np.append(self.is_posted, np.zeros((count - 1) * len(self), np.bool_)),
        )


class MessagePrices:
    """Prices of messages between devices, which are counted by their position."""

    def __init__(self, costs: StepCosts, devices: tuple[int, ...]) -> None:
        self.devices, self._costs = np.array(devices), costs

    @remembered
    def nbytes(self, source: int, target: int, forward: bool, samples: int) -> float:
        """Bytes that stage ``source`` sends to ``target`` for so many samples."""
        edge = (source, target) if forward else (target, source)
        return self._costs.message_bytes(*edge, samples)[not forward]

    def messages(self, sender: Ints, receiver: Ints, nbytes: Floats, opener: Ints) -> Messages:
        """Messages by these columns."""
        count = len(self.devices)
        pairs, way = np.unique(sender * count + receiver, return_inverse=True)
        ends = zip(*(self.devices[side].tolist() for side in divmod(pairs, count)), strict=True)
        routes = [self._costs.route(a, b) for a, b in ends]
        per_byte_s, latency_s = np.array([route[:2] for route in routes]).reshape(-1, 2).T
        sizes, size = np.unique(nbytes, return_inverse=True)
        ends_s = np.array([self._costs.message_s(float(n)) for n in sizes]).reshape(-1, 2).T
        return Messages(
            way,
            [route.ports for route in routes],
            nbytes * per_byte_s[way],
            latency_s[way],
            ends_s[:, size],
            opener,
            opener < 0,
        )


def numbered(schedule: Schedule, prices: MessagePrices, lists: Lists) -> Messages:
    """Number the messages of a lowered schedule by their receives, and list them."""
    received: dict[Channel, list[int]] = defaultdict(list)
    groups: dict[Channel, dict[int, list[int]]] = defaultdict(dict)
    index = {device: d for d, device in enumerate(schedule.actions)}
    found: list[tuple[float, ...]] = []
    for device, actions in schedule.actions.items():
        for action in actions:
            if action.kind.is_receive:
                key = source, target, a, b, forward = channel(action, device)
                received[key].append(len(found))
                groups[key].setdefault(action.microbatch, []).append(len(found))
                nbytes = prices.nbytes(source, target, forward, action.stop - action.start)
                found.append((index[a], index[b], nbytes))
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
    return prices.messages(sender.astype(np.int64), receiver.astype(np.int64), nbytes_of, opener)


def put_in(
    schedule: Schedule,
    passes: Passes,
    graph: StageGraph,
    prices: MessagePrices,
    costs: StepCosts,
    lists: Lists,
) -> Messages:
    """Number the messages that ``lower`` would put in, those of each stage edge in a row, and list
    them before and behind the computes.
    """
    index = np.zeros(max(*graph.devices, *schedule.actions) + 1, np.int64)
    index[prices.devices] = np.arange(len(prices.devices))
    columns, sizes = [np.zeros((6, 0), np.int64)], [np.zeros(0)]
    for number, (source, target, forward) in enumerate(directions(graph, costs.message_edges)):
        i, a, j, b, start, stop = message_table(graph, source, target, forward=forward)
        at = passes.positions(graph, source, forward, a, i)
        needed_at = passes.positions(graph, target, forward, b, j)
        columns.append(np.array([index[a], at, index[b], needed_at, j, np.full_like(a, number)]))
        samples, size = np.unique(stop - start, return_inverse=True)
        nbytes = [prices.nbytes(source, target, forward, n) for n in samples.tolist()]
        sizes.append(np.array(nbytes, np.float64)[size])
    a, at, b, needed_at, microbatch, way = np.concatenate(columns, axis=1)
    numbers = np.arange(len(a))
    lists.put(a, place(at, SENDS), ~numbers)
    lists.put(b, place(needed_at, RECEIVES), numbers)
    way = (way * len(index) + a) * len(index) + b
    opener = _openers(way, microbatch, schedule.slots)
    return prices.messages(a, b, np.concatenate(sizes), opener)


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
