"""Emulated links in memory that all ranks of one machine share.

A message starts when it has been sent, its receive is posted and every port on its way is free; the
rank at the second of the two ends computes its arrival. A piece of an all-reduce starts when the
gradients of all its ranks are final and the piece before it has ended; the next rank that uses a
port at a later time computes its end. These are the rules of ``simulator.run``, on processes
instead of a queue of events.

A port belongs to the message that is ready first by device time; but a rank that the host delays
asks late. So a port remembers the periods for which it is taken, each from the time at which its
message was ready, and a message goes into the first gap after its own time::

    taken        [ready====end]            [ready=====end]
    asks late                    ^ready [==]
"""

from __future__ import annotations

import math
import mmap
import multiprocessing
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from anabranch.cost.communication import Route
from anabranch.runtime.transport import Channel
from anabranch.simulator.sums import Sum

_PERIODS = 24
"""Periods that a port remembers; beyond that the two oldest become one, with the gap between."""

_NEVER = -math.inf

SENT, POSTED = 0, 1
"""The ends of a message: it has been handed over, and its receive has been posted."""


class SharedLinks:
    """Times of one step, in device seconds since it began; made before the ranks are forked.

    Args:
        channels: channel -> messages of a step.
        ports: number of ports.
        sums: pieces of all all-reduces.
    """

    def __init__(self, channels: Mapping[Channel, int], ports: int, sums: Sequence[Sum]) -> None:
        bounds = [0, *accumulate(channels.values())]
        self._of_channel = {
            channel: slice(*rows) for channel, rows in zip(channels, pairwise(bounds), strict=True)
        }
        self._sums = tuple(sums)
        self._queues: dict[int, list[int]] = defaultdict(list)
        for number, work in enumerate(self._sums):
            self._queues[work.queue].append(number)
        # Per port, start and end of each period, ascending, infinite behind the last; per message,
        # times at which it is sent, posted and arrives; per sum, gradients that are still to come
        # and the time of the latest; per queue, sums that were started and the end of the latest.
        self._periods = _shared(ports, _PERIODS, 2)
        self._messages = _shared(bounds[-1], 3)
        self._gradients = _shared(len(sums), 2)
        self._started = _shared(len(self._queues), 2)
        self._lock = multiprocessing.get_context("fork").Lock()

    def clear(self, rank: int) -> None:
        """Forget the last step; every rank does its part, and a barrier has to follow."""
        for channel, rows in self._of_channel.items():
            if channel.receiver == rank:
                self._messages[rows] = _NEVER
        if rank == 0:
            self._periods[:], self._started[:] = math.inf, 0.0
            for number, work in enumerate(self._sums):
                self._gradients[number] = work.waits_for, 0.0

    def arrival(self, channel: Channel, number: int) -> float:
        """Return the arrival time of a message that has been sent and posted."""
        return float(self._messages[self._of_channel[channel]][number, 2])

    def meet(
        self, channel: Channel, number: int, end: int, at: float, route: Route, nbytes: int
    ) -> None:
        """Note one end of message ``number`` of a channel: ``SENT``, or its receive ``POSTED``."""
        message = self._messages[self._of_channel[channel]][number]
        with self._lock:
            message[end] = at
            other = float(message[1 - end])
            if other != _NEVER:
                self._start_sums(max(at, other))
                free = self.occupy(route.ports, max(at, other), nbytes * route.per_byte_s)
                message[2] = free + route.latency_s

    def occupy(self, ports: Sequence[int], at: float, seconds: float) -> float:
        """Take all ports as soon as they are free together; return when they are free again."""
        taken = [[(a, b) for a, b in self._periods[p].tolist() if a < math.inf] for p in ports]
        start, moved = at, True
        while moved:
            moved = False
            for periods in taken:
                for begin, end in periods:
                    if begin < start + seconds and start < end:
                        start, moved = end, True
        end = start + seconds
        for port, periods in zip(ports, taken, strict=True):
            joined = _joined([*periods, (at, end)])
            if len(joined) > _PERIODS:
                joined[:2] = [(joined[0][0], joined[1][1])]
            self._periods[port] = math.inf
            self._periods[port, : len(joined)] = joined
        return end

    def give(self, number: int, at: float) -> None:
        """Count the gradients of one rank as final for a sum."""
        gradients = self._gradients[number]
        with self._lock:
            gradients[0] -= 1
            gradients[1] = max(gradients[1], at)

    def ended(self, numbers: Sequence[int], at: float) -> tuple[float, bool]:
        """Return the end of the last of some all-reduces, or a lower bound of it, and True if it is
        the end.

        Args:
            at: time up to which all events are known.
        """
        with self._lock:
            self._start_sums(at)
            latest, is_sure = 0.0, True
            for queue in {self._sums[number].queue for number in numbers}:
                started, end = self._started[queue].tolist()
                left = self._queues[queue][int(started) :]
                seconds = sum(self._sums[number].seconds for number in left)
                latest = max(latest, end if not left else max(end, at) + seconds)
                is_sure = is_sure and not left
        return latest, is_sure

    def _start_sums(self, until: float) -> None:
        """Start the sums that come before a time, in the order of their times."""
        while True:
            starts = [start for start in map(self._next_start, self._queues) if start[0] <= until]
            if not starts:
                return
            at, queue = min(starts)
            started = self._started[queue]
            work = self._sums[self._queues[queue][int(started[0])]]
            started[:] = started[0] + 1, self.occupy(work.ports, at, work.seconds)

    def _next_start(self, queue: int) -> tuple[float, int]:
        """Return the start of the next all-reduce of a queue; infinite if unknown."""
        started, free = self._started[queue].tolist()
        if started == len(self._queues[queue]):
            return math.inf, queue
        to_come, latest = self._gradients[self._queues[queue][int(started)]].tolist()
        return (math.inf if to_come else max(latest, free)), queue


def _shared(*shape: int) -> NDArray[np.float64]:
    """Return zeros that this process shares with processes forked from it."""
    memory = mmap.mmap(-1, 8 * max(math.prod(shape), 1))
    return np.frombuffer(memory, count=math.prod(shape)).reshape(shape)


def _joined(periods: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Sort periods, and join those that touch or overlap."""
    result: list[tuple[float, float]] = []
    for begin, end in sorted(periods):
        if result and begin <= result[-1][1]:
            result[-1] = result[-1][0], max(result[-1][1], end)
        else:
            result.append((begin, end))
    return result
