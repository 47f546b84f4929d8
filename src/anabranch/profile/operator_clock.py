"""Clocks that time operators one by one, on the CPU and on a GPU."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from anabranch.device import accelerator


class OperatorClock:
    """Seconds of operators on the CPU."""

    def start(self, num_ops: int) -> None:
        self.forward_s = [0.0] * num_ops
        self.backward_s = [0.0] * num_ops
        self._op = -1

    @contextmanager
    def forward(self, op: int) -> Iterator[None]:
        """Time the forward of an operator inside."""
        begun = self.now()
        yield
        self.add(self.forward_s, op, begun, self.now())

    def arrive(self, op: int, gradient: Tensor) -> None:
        """Begin the backward of an operator, or go on with it, and end that of another one."""
        self.leave()
        self._op, self._since = op, self.now()

    def leave(self) -> None:
        """End the current backward."""
        if self._op >= 0:
            self.add(self.backward_s, self._op, self._since, self.now())
        self._op = -1

    def now(self) -> Any:
        """Return a moment, behind all work that was given to the device."""
        return time.perf_counter()

    def add(self, seconds: list[float], op: int, begin: Any, end: Any) -> None:
        """Add the time between two moments to the seconds of an operator."""
        seconds[op] += end - begin

    def stop(self) -> tuple[list[float], list[float]]:
        return self.forward_s, self.backward_s


class EventOperatorClock(OperatorClock):
    """Seconds on a GPU: events in its stream, read when it has caught up."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def start(self, num_ops: int) -> None:
        super().start(num_ops)
        self.events: list[tuple[list[float], int, torch.Event, torch.Event]] = []
        accelerator.synchronize(self.device)

    def now(self) -> torch.Event:
        return accelerator.record_event(self.device, timed=True)

    def add(self, seconds: list[float], op: int, begin: Any, end: Any) -> None:
        self.events.append((seconds, op, begin, end))

    def stop(self) -> tuple[list[float], list[float]]:
        accelerator.synchronize(self.device)
        for seconds, op, start, end in self.events:
            seconds[op] += start.elapsed_time(end) / 1e3
        return super().stop()
