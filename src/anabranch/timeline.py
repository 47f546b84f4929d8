"""Timeline: what every device did when, predicted by the simulator or recorded by a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from anabranch.schedule.schedule import Action


@dataclass(frozen=True, slots=True)
class Span:
    """One action of one device, in seconds from the start of the step."""

    device: int
    start: float
    end: float
    action: Action


@dataclass(frozen=True)
class Timeline:
    """Spans of every device, with memory over time.

    Attributes:
        spans: compute and messages; sorted by device, then start.
        devices: all devices, also those that did nothing.
        source: ``predicted`` or ``measured``.
        step_s: seconds of the whole step, with what follows the last compute (all-reduce, update).
        memory: device -> ascending (time, bytes in use from then on).
    """

    spans: tuple[Span, ...]
    devices: tuple[int, ...]
    source: str
    step_s: float
    memory: Mapping[int, tuple[tuple[float, int], ...]]

    @cached_property
    def busy_s(self) -> dict[int, float]:
        """Device -> seconds of compute."""
        busy = dict.fromkeys(self.devices, 0.0)
        for span in self.spans:
            if span.action.kind.is_compute:
                busy[span.device] += span.end - span.start
        return busy

    @property
    def makespan_s(self) -> float:
        """Seconds from the start of the step to the end of the last span."""
        return max((span.end for span in self.spans), default=0.0)

    @property
    def bubble(self) -> float:
        """Share of device time in the step that is not compute."""
        whole = self.step_s * len(self.devices)
        return 1 - sum(self.busy_s.values()) / whole if whole else 0.0

    @property
    def peak_bytes(self) -> dict[int, int]:
        """Device -> most bytes in use at any time."""
        return {d: max((b for _, b in self.memory.get(d, ())), default=0) for d in self.devices}
