"""Clocks that mark when actions began and ended, on the device that computes them.

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


class StreamEvent(Protocol):
    """A moment in a stream: ``torch.cuda.Event``."""

    def synchronize(self) -> None:
        """Wait until it has come."""
        ...

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds to another event."""
        ...


Mark = StreamEvent | float


class Clock:
    """Clock of one device: of a GPU while it records, of the host otherwise.

    Args:
        event: puts an event into the compute stream of a GPU; None for a CPU.
    """

    def __init__(self, event: Callable[[], StreamEvent] | None = None) -> None:
        self._event = event
        self._first: StreamEvent | None = None
        self._first_s, self._records = 0.0, False

    def begin(self) -> None:
        """Wait until the device is idle, and mark moments of the device from now on."""
        if self._event is not None:
            self._first = self._event()
            self._first.synchronize()
            self._first_s = perf_counter()
            self._records = True

    def end(self) -> None:
        """Wait until the device is idle, and mark moments of the host from now on."""
        if self._event is not None:
            self._event().synchronize()
            self._records = False

    def mark(self) -> Mark:
        """Mark the moment behind everything that the device has been given so far."""
        return self._event() if self._event is not None and self._records else perf_counter()

    def seconds(self, marks: Sequence[Mark]) -> list[float]:
        """Convert marks into the time of ``time.perf_counter``."""
        return [mark if isinstance(mark, float) else self._seconds(mark) for mark in marks]

    def _seconds(self, mark: StreamEvent) -> float:
        assert self._first is not None
        mark.synchronize()
        return self._first_s + self._first.elapsed_time(mark) / 1e3


def clock_of(place: torch.device) -> Clock:
    """Return the clock of a device."""
    if place.type != "cuda":
        return Clock()

    def event() -> StreamEvent:
        made = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        made.record(torch.cuda.current_stream(place))
        return made

    return Clock(event)
