"""A clock and a queue of events, and processor cores that several jobs share.

Nothing in here knows of stages, messages or networks. An event is a call at a time; events at the
same time happen in the order in which they were put in, so a run is repeatable to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from typing import Any

from anabranch.cost.overheads import slowdown_of

Callback = Callable[[Any], object]


class Engine:
    """The clock. ``now`` is in seconds and moves only from event to event.

    An event has a place among those of the same time. A place can be taken early (``last_place +=
    1``) and the event put in later or never; ``place`` is that of the current event.
    """

    __slots__ = ("_queue", "last_place", "now", "place")

    def __init__(self) -> None:
        self.now = 0.0
        self.place = self.last_place = 0
        self._queue: list[tuple[float, int, Callback, Any]] = []

    def at(self, time: float, callback: Callback, argument: Any) -> None:
        """Call ``callback(argument)`` when the clock shows ``time``, which is not in the past."""
        # The place keeps simultaneous events in order, and tuples from comparing their callbacks.
        self.last_place += 1
        heappush(self._queue, (time, self.last_place, callback, argument))

    def at_place(self, time: float, place: int, callback: Callback, argument: Any) -> None:
        """Likewise, at a place that was taken before."""
        heappush(self._queue, (time, place, callback, argument))

    def after(self, seconds: float, callback: Callback, argument: Any) -> None:
        """Call ``callback(argument)`` when this many seconds have passed."""
        self.last_place += 1
        heappush(self._queue, (self.now + seconds, self.last_place, callback, argument))

    def run(self) -> None:
        """Go from event to event until none is left."""
        queue = self._queue
        while queue:
            self.now, self.place, callback, argument = heappop(queue)
            callback(argument)


class SharedCores:
    """Jobs that share processors and memory: the more there are, the longer all take.

    Args:
        slowdown: how many times as long with 1, 2, ... jobs; with more than there are entries, as
            many times longer than the last as they are more.

    Jobs are kept by the work that one running job will have done by its end, so only the job that
    ends next has an event in the engine.
    """

    def __init__(self, engine: Engine, slowdown: Sequence[float]) -> None:
        self._engine = engine
        self._slowdown = slowdown
        self._jobs: list[tuple[float, int, Callback, Any]] = []
        self._count = 0
        self._work = 0.0
        self._since = 0.0
        self._epoch = 0

    def after(self, seconds: float, callback: Callback, argument: Any) -> None:
        """Call ``callback(argument)`` after this many seconds of one core's work."""
        self._catch_up()
        self._count += 1
        heappush(self._jobs, (self._work + seconds, self._count, callback, argument))
        self._expect_next()

    @property
    def _speed(self) -> float:
        return 1 / slowdown_of(self._slowdown, len(self._jobs))

    def _catch_up(self) -> None:
        if self._jobs:
            self._work += (self._engine.now - self._since) * self._speed
        self._since = self._engine.now

    def _expect_next(self) -> None:
        self._epoch += 1  # whatever end was expected before may have moved
        if self._jobs:
            seconds = max(self._jobs[0][0] - self._work, 0.0) / self._speed
            self._engine.after(seconds, self._finish, self._epoch)

    def _finish(self, epoch: int) -> None:
        if epoch != self._epoch:
            return
        self._since = self._engine.now
        self._work, _, callback, argument = heappop(self._jobs)
        self._expect_next()
        callback(argument)
