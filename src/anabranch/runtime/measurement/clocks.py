"""Clocks that say when actions began and ended, on the device that computes them.

A host gives a GPU its work long before the work is done, so while a step is recorded its actions
are marked by events in the compute stream. Marks become seconds afterwards::

    host     mark F0 mark   mark F1 mark                       seconds(marks)
    GPU           |..........F0..........|..........F1..........|
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any, Protocol

import torch


class Clock(Protocol):
    """What marks moments of one device."""

    def begin(self) -> None:
        """Wait until the device is idle; from now on marks are of the device."""
        ...

    def end(self) -> None:
        """Wait until the device is idle; from now on marks are of the host."""
        ...

    def mark(self) -> Any:
        """Now, behind everything that the device has been given so far."""
        ...

    def seconds(self, marks: Sequence[Any]) -> list[float]:
        """When marks were, in the time of ``time.perf_counter``."""
        ...


class HostClock:
    """The clock of a device that computes when the host does."""

    def begin(self) -> None:
        """See ``Clock``; they always are, and it always is."""

    def end(self) -> None:
        """See ``begin``."""

    def mark(self) -> float:
        return perf_counter()

    def seconds(self, marks: Sequence[float]) -> list[float]:
        return list(marks)


class Event(Protocol):
    """A moment in a stream: ``torch.cuda.Event``."""

    def synchronize(self) -> None:
        """Wait until it has come."""
        ...

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds to another event."""
        ...


class EventClock:
    """The clock of a GPU: of the device while it records, of the host otherwise.

    Args:
        event: puts an event into the compute stream.
    """

    def __init__(self, event: Callable[[], Event]) -> None:
        self._event = event
        self._base: Event | None = None
        self._base_s = 0.0
        self._is_recording = False

    def begin(self) -> None:
        self._base = self._event()
        self._base.synchronize()
        self._base_s, self._is_recording = perf_counter(), True

    def end(self) -> None:
        self._event().synchronize()
        self._is_recording = False

    def mark(self) -> Event | float:
        return self._event() if self._is_recording else perf_counter()

    def seconds(self, marks: Sequence[Event | float]) -> list[float]:
        return [mark if isinstance(mark, float) else self._of(mark) for mark in marks]

    def _of(self, mark: Event) -> float:
        assert self._base is not None
        mark.synchronize()
        return self._base_s + self._base.elapsed_time(mark) / 1e3


def clock_of(place: torch.device) -> Clock:
    """The clock of a device."""
    if place.type != "cuda":
        return HostClock()

    def event() -> Event:
        made = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        made.record(torch.cuda.current_stream(place))
        return made

    return EventClock(event)
