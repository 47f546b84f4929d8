"""Emulated links in memory that all ranks of one machine share.

A message starts when it has been sent and its receive is posted, at the later of the two, and when
every port on its way is free; whichever end comes second works out when it arrives. An all-reduce
starts when the last of its ranks has come to it, and that rank leads it. These are the rules of
``simulator.run``, on processes instead of a queue of events.

Whoever is ready first by device time has a port first; but a rank that the host delays asks late.
So a port remembers the periods for which it is taken, each from when its message was ready, and a
message goes into the first gap after its own time::

    taken        [ready====end]            [ready=====end]
    asks late                    ^ready [==]
"""

from __future__ import annotations

import mmap
import multiprocessing
from collections.abc import Mapping, Sequence

from anabranch.simulator.program import Price

Channel = tuple[int, int, int]
"""Sending rank, receiving rank, tag."""

_PERIODS = 24
"""Periods that a port remembers; of more, the oldest are forgotten, as gaps too."""

_PER_PORT = 1 + 2 * _PERIODS  # how many, then the start and end of each, ascending
_NEVER = -1.0
_PER_MESSAGE = 3  # sent, posted, arrives
_PER_RING = 2  # ranks that are still to come, when the latest of them came


class SharedLinks:
    """Times of one step, in device seconds since it began; made before the ranks are forked.

    ``rings`` has, per all-reduce, how many ranks take part.
    """

    def __init__(self, channels: Mapping[Channel, int], ports: int, rings: Sequence[int]) -> None:
        self._first: dict[Channel, int] = {}
        self._rings = tuple(rings)
        self._ports = range(ports)
        at = _PER_PORT * ports
        for channel, count in channels.items():
            self._first[channel] = at
            at += _PER_MESSAGE * count
        self._ring = at
        self._counts = dict(channels)
        size = at + _PER_RING * len(rings)
        self._cells = memoryview(mmap.mmap(-1, max(8 * size, 8))).cast("d")
        self._lock = multiprocessing.get_context("fork").Lock()

    def clear(self, rank: int) -> None:
        """Forget the last step; every rank does its part, and a barrier has to follow."""
        for channel, first in self._first.items():
            if channel[1] == rank:
                for i in range(first, first + _PER_MESSAGE * self._counts[channel]):
                    self._cells[i] = _NEVER
        if rank == 0:
            for port in self._ports:
                self._cells[_PER_PORT * port] = 0.0
            for ring, ranks in enumerate(self._rings):
                at = self._ring + _PER_RING * ring
                self._cells[at], self._cells[at + 1] = ranks, 0.0

    def sent(self, channel: Channel, number: int, at: float, price: Price) -> None:
        """Note that the n-th message of a channel has been handed over."""
        self._meet(channel, number, 0, at, price)

    def posted(self, channel: Channel, number: int, at: float, price: Price) -> None:
        """Note that its receive has been posted."""
        self._meet(channel, number, 1, at, price)

    def arrival(self, channel: Channel, number: int) -> float:
        """When it arrives; both of its ends must have come."""
        return self._cells[self._first[channel] + _PER_MESSAGE * number + 2]

    def _meet(self, channel: Channel, number: int, end: int, at: float, price: Price) -> None:
        cells, row = self._cells, self._first[channel] + _PER_MESSAGE * number
        with self._lock:
            cells[row + end] = at
            other = cells[row + 1 - end]
            if other != _NEVER:
                free = self._occupy(price.ports, max(at, other), price.occupies_s)
                cells[row + 2] = free + price.latency_s

    def occupy(self, ports: Sequence[int], at: float, seconds: float) -> float:
        """Take all ports as soon as they are free together; when they are free again."""
        with self._lock:
            return self._occupy(ports, at, seconds)

    def _occupy(self, ports: Sequence[int], at: float, seconds: float) -> float:
        taken = [self._periods(port) for port in ports]
        start, moved = at, True
        while moved:
            moved = False
            for periods in taken:
                for begin, end in periods:
                    if begin < start + seconds and start < end:
                        start, moved = end, True
        end = start + seconds
        for port, periods in zip(ports, taken, strict=True):
            self._keep(port, _joined([*periods, (at, end)]))
        return end

    def _periods(self, port: int) -> list[tuple[float, float]]:
        first = _PER_PORT * port
        numbers = self._cells[first + 1 : first + 1 + 2 * int(self._cells[first])].tolist()
        return list(zip(numbers[::2], numbers[1::2], strict=True))

    def _keep(self, port: int, periods: list[tuple[float, float]]) -> None:
        while len(periods) > _PERIODS:
            periods[:2] = [(periods[0][0], periods[1][1])]
        first = _PER_PORT * port
        self._cells[first] = len(periods)
        for i, (begin, end) in enumerate(periods):
            self._cells[first + 1 + 2 * i], self._cells[first + 2 + 2 * i] = begin, end

    def come(self, ring: int, at: float) -> float | None:
        """Come to an all-reduce; the last rank to come, and only that, is told when it starts."""
        cells, row = self._cells, self._ring + _PER_RING * ring
        with self._lock:
            cells[row] -= 1
            cells[row + 1] = max(cells[row + 1], at)
            return None if cells[row] else cells[row + 1]


def _joined(periods: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Periods in order, those that touch or overlap as one."""
    result: list[tuple[float, float]] = []
    for begin, end in sorted(periods):
        if result and begin <= result[-1][1]:
            result[-1] = result[-1][0], max(result[-1][1], end)
        else:
            result.append((begin, end))
    return result
