"""Clocks that mark when actions began and ended, on the device that computes them.

A host gives a GPU its work long before the work is done, so while a step is recorded its actions
are marked by events in the compute stream. Marks become seconds afterwards::

    host     mark F0 mark   mark F1 mark                       seconds(marks)
    GPU           |..........F0..........|..........F1..........|
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter

import torch

from anabranch.device import accelerator

Mark = torch.Event | float
"""A moment in the compute stream of a GPU, or seconds of ``time.perf_counter``."""

_SIZE, _ACCELERATOR_SIZE, _REPEATS = 256, 2048, 15
"""Rows of square matrices whose product takes a millisecond or so, on the CPU and on an
accelerator, and number of products; the quicker half counts.
"""


class Clock:
    """Clock of one device: of a GPU while it records, of the host otherwise.

    Args:
        event: records an event in the compute stream of a GPU; None for a CPU.
    """

    def __init__(self, event: Callable[[], torch.Event] | None = None) -> None:
        self._event = event
        self._first: torch.Event | None = None
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
        """Mark the moment behind all work that the device has been given so far."""
        return self._event() if self._event is not None and self._records else perf_counter()

    def seconds(self, marks: Sequence[Mark]) -> list[float]:
        """Convert marks into the time of ``time.perf_counter``."""
        return [mark if isinstance(mark, float) else self._seconds(mark) for mark in marks]

    def _seconds(self, mark: torch.Event) -> float:
        assert self._first is not None
        mark.synchronize()
        milliseconds: float = self._first.elapsed_time(mark)
        return self._first_s + milliseconds / 1e3


def clock_of(device: torch.device) -> Clock:
    if not accelerator.has_streams(device):
        return Clock()
    return Clock(lambda: accelerator.record_event(device, timed=True))


def yardstick_s(device: torch.device) -> float:
    """Measure a fixed piece of work, which shows the speed of each device if all ranks do it at the
    same time. The quicker half counts: interruptions do not make a device slow, but processes that
    share its processor do.
    """
    size = _ACCELERATOR_SIZE if accelerator.is_on_accelerator(device) else _SIZE
    matrix = torch.ones(size, size, device=device)
    taken = []
    for _ in range(_REPEATS):
        began = perf_counter()
        torch.mm(matrix, matrix)
        accelerator.synchronize(device)
        taken.append(perf_counter() - began)
    quick = sorted(taken[1:])[: _REPEATS // 2]
    return sum(quick) / len(quick)
