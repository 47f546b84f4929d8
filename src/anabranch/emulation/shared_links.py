"""Emulated links in memory that all ranks of one machine share.

A message starts when it has been sent and its receive is posted, at the later of the two, and when
every port on its way is free; whichever end comes second works out when it arrives. A piece of an
all-reduce starts when the gradients of all of its ranks are final and the piece before it has
ended; whoever next uses a port later than that works out when it ends. These are the rules of
``simulator.run``, on processes instead of a queue of events.

Whoever is ready first by device time has a port first; but a rank that the host delays asks late.
So a port remembers the periods for which it is taken, each from when its message was ready, and a
message goes into the first gap after its own time::

    taken        [ready====end]            [ready=====end]
    asks late                    ^ready [==]
"""

from __future__ import annotations

import math
import mmap
import multiprocessing
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from anabranch.simulator.sums import Sum

Channel = tuple[int, int, int]
"""Sending rank, receiving rank, tag."""

_PERIODS = 24
"""Periods that a port remembers; of more, the oldest are forgotten, as gaps too."""

_PER_PORT = 1 + 2 * _PERIODS  # how many, then the start and end of each, ascending
_NEVER = -1.0
_PER_MESSAGE = 3  # sent, posted, arrives
_PER_SUM = 2  # gradients that are still to come, when the latest of them came
_PER_QUEUE = 2  # sums that have been started, when the latest of them ends


class Price(NamedTuple):
    """Cost of a message: seconds on its ports, seconds from then to its arrival, indices of its
    ports.
    """

    occupies_s: float
    latency_s: float
    ports: tuple[int, ...]


class SharedLinks:
    """Times of one step, in device seconds since it began; made before the ranks are forked.

    ``sums`` are the pieces of all all-reduces.
    """

    def __init__(self, channels: Mapping[Channel, int], ports: int, sums: Sequence[Sum]) -> None:
        self._first: dict[Channel, int] = {}
        self._sums = tuple(sums)
        self._queues: dict[int, list[int]] = defaultdict(list)
        for number, work in enumerate(self._sums):
            self._queues[work.queue].append(number)
        self._ports = range(ports)
        at = _PER_PORT * ports
        for channel, count in channels.items():
            self._first[channel] = at
            at += _PER_MESSAGE * count
        self._counts = dict(channels)
        self._sum = at
        self._queue = at + _PER_SUM * len(self._sums)
        size = self._queue + _PER_QUEUE * len(self._queues)
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
            for number, work in enumerate(self._sums):
                at = self._sum + _PER_SUM * number
                self._cells[at], self._cells[at + 1] = work.waits_for, 0.0
            for i in range(_PER_QUEUE * len(self._queues)):
                self._cells[self._queue + i] = 0.0

    def sent(self, channel: Channel, number: int, at: float, price: Price) -> None:
        """Note that the n-th message of a channel has been handed over."""
        self._meet(channel, number, 0, at, price)

    def posted(self, channel: Channel, number: int, at: float, price: Price) -> None:
        """Note that its receive has been posted."""
        self._meet(channel, number, 1, at, price)

    def arrival(self, channel: Channel, number: int) -> float:
        """Return the arrival time of a message whose both ends have come."""
        return self._cells[self._first[channel] + _PER_MESSAGE * number + 2]

    def _meet(self, channel: Channel, number: int, end: int, at: float, price: Price) -> None:
        cells, row = self._cells, self._first[channel] + _PER_MESSAGE * number
        with self._lock:
            cells[row + end] = at
            other = cells[row + 1 - end]
            if other != _NEVER:
                self._start_sums(max(at, other))
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

    def give(self, number: int, at: float) -> None:
        """A rank's gradients of a sum are final."""
        cells, row = self._cells, self._sum + _PER_SUM * number
        with self._lock:
            cells[row] -= 1
            cells[row + 1] = max(cells[row + 1], at)

    def ended(self, numbers: Sequence[int], at: float) -> tuple[float, bool]:
        """Return the end of the last of some all-reduces, or its lower bound, and True if it is the
        end.

        Args:
            at: what happens until then is known.
        """
        with self._lock:
            self._start_sums(at)
            latest, is_sure = 0.0, True
            for queue in {self._sums[number].queue for number in numbers}:
                started, end = self._cells[self._queue + _PER_QUEUE * queue :][:2]
                left = self._queues[queue][int(started) :]
                seconds = sum(self._sums[number].seconds for number in left)
                latest = max(latest, end if not left else max(end, at) + seconds)
                is_sure = is_sure and not left
        return latest, is_sure

    def _start_sums(self, until: float) -> None:
        """Start the sums that come before a time, in the order of their times."""
        while True:
            found = [start for start in map(self._next_start, self._queues) if start[0] <= until]
            if not found:
                return
            at, queue = min(found)
            cells, row = self._cells, self._queue + _PER_QUEUE * queue
            number = self._queues[queue][int(cells[row])]
            work = self._sums[number]
            end = self._occupy(work.ports, at, work.seconds)
            cells[row] += 1
            cells[row + 1] = end

    def _next_start(self, queue: int) -> tuple[float, int]:
        """Return the start of the next all-reduce of a queue; infinite if unknown."""
        cells, row = self._cells, self._queue + _PER_QUEUE * queue
        done = int(cells[row])
        if done == len(self._queues[queue]):
            return math.inf, queue
        at = self._sum + _PER_SUM * self._queues[queue][done]
        return (math.inf if cells[at] else max(cells[at + 1], cells[row + 1])), queue


def _joined(periods: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Periods in order, those that touch or overlap as one."""
    result: list[tuple[float, float]] = []
    for begin, end in sorted(periods):
        if result and begin <= result[-1][1]:
            result[-1] = result[-1][0], max(result[-1][1], end)
        else:
            result.append((begin, end))
    return result
