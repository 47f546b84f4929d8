"""Timeline: what every device did when, predicted by the simulator or recorded by a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple

from anabranch.schedule.schedule import Action


@dataclass(frozen=True, slots=True)
class Span:
    """One action of one device, in seconds from the start of the step."""

    device: int
    start: float
    end: float
    action: Action


@dataclass(frozen=True, slots=True)
class SumSpan:
    """A sum of gradients that a device takes part in, in seconds from the start.

    Attributes:
        stages: stages whose gradients are summed.
        nbytes: bytes of the gradients.
    """

    device: int
    start: float
    end: float
    stages: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class OverheadSpan:
    """Time of a device besides its actions, in seconds from the start.

    Attributes:
        what: ``bookkeeping`` (of messages and of the step), ``agreement``, ``update`` or ``gather``
            (of updated parameters, among replicas that share the optimizer's state).
    """

    device: int
    start: float
    end: float
    what: str


class Cause(StrEnum):
    """Cause of a part of a step."""

    COMPUTE = "compute"
    MESSAGE = "message"
    ALL_REDUCE = "all_reduce"
    AGREEMENT = "agreement"
    UPDATE = "update"
    GATHER = "gather"
    OVERHEAD = "overhead"


class PathSegment(NamedTuple):
    """A part of a step with its cause.

    Attributes:
        stages: stages that compute or sum gradients; sender and receiver of a message; else empty.
        device: device that is busy, or waits for the message.
    """

    start: float
    end: float
    cause: Cause
    stages: tuple[int, ...]
    device: int


@dataclass(frozen=True)
class Timeline:
    """Spans of every device, with memory over time.

    Attributes:
        spans: compute and messages; sorted by device, then start.
        devices: all devices, also those that did nothing.
        source: ``predicted`` or ``measured``.
        step_s: seconds of the whole step, all-reduces and update after the last compute included.
        memory: device -> ascending (time, bytes in use from then on).
        sums: all-reduces, piece by piece, sorted by device and start; empty if not known.
        overheads: other work of devices, sorted in the same way; empty if not known.
        period_s: seconds of the step in a row of steps, each device beginning the next when it has
            ended one; None if not known.
    """

    spans: tuple[Span, ...]
    devices: tuple[int, ...]
    source: str
    step_s: float
    memory: Mapping[int, tuple[tuple[float, int], ...]]
    sums: tuple[SumSpan, ...] = ()
    overheads: tuple[OverheadSpan, ...] = ()
    period_s: float | None = None

    @cached_property
    def busy_s(self) -> dict[int, float]:
        """Device -> seconds of compute."""
        busy = dict.fromkeys(self.devices, 0.0)
        for span in self.spans:
            if span.action.kind.is_compute:
                busy[span.device] += span.end - span.start
        return busy

    @property
    def parts(self) -> dict[str, float]:
        """Seconds of the step by activity of the mean device: ``compute``, each kind of overhead,
        and ``wait`` for the rest.
        """
        spent = {"compute": sum(self.busy_s.values())}
        for span in self.overheads:
            spent[span.what] = spent.get(span.what, 0.0) + span.end - span.start
        parts = {what: seconds / len(self.devices) for what, seconds in spent.items()}
        return {**parts, "wait": max(0.0, self.step_s - sum(parts.values()))}

    @property
    def phases(self) -> dict[str, float]:
        """Seconds of the step, also of a measured one: ``begin`` until the first action of any
        device, ``compute`` of the mean device, ``between`` (messages and waiting), and ``end`` from
        the last action on (the rest of the all-reduces, agreement and update).
        """
        begin = min((span.start for span in self.spans), default=0.0)
        compute = sum(self.busy_s.values()) / len(self.devices) if self.devices else 0.0
        return {
            "begin": begin,
            "compute": compute,
            "between": self.makespan_s - begin - compute,
            "end": self.step_s - self.makespan_s,
        }

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
    def exposed_sums(self) -> float:
        """Share of device time with sums of gradients and nothing else; a part of the bubble."""
        whole = self.step_s * len(self.devices)
        if not (whole and self.sums):
            return 0.0
        busy: dict[int, list[tuple[float, float]]] = {device: [] for device in self.devices}
        for span in self.spans:
            if span.action.kind.is_compute:
                busy[span.device].append((span.start, span.end))
        for other in self.overheads:
            busy[other.device].append((other.start, other.end))
        seconds, until = 0.0, dict.fromkeys(self.devices, 0.0)
        for piece in sorted(self.sums, key=lambda piece: piece.start):
            start = max(piece.start, until[piece.device])
            end = until[piece.device] = max(piece.end, until[piece.device])
            # Spans that have ended by now do not overlap later sums either.
            beside_it = busy[piece.device] = [x for x in busy[piece.device] if x[1] > start]
            beside = (min(b, end) - max(a, start) for a, b in beside_it)
            seconds += end - start - sum(shared for shared in beside if shared > 0)
        return max(seconds, 0.0) / whole

    @property
    def device_bubble(self) -> dict[int, float]:
        """Device -> share of the step in which it does not compute."""
        return {d: 1 - s / self.step_s if self.step_s else 0.0 for d, s in self.busy_s.items()}

    @property
    def peak_bytes(self) -> dict[int, int]:
        """Device -> most bytes in use at any time."""
        return {d: max((b for _, b in self.memory.get(d, ())), default=0) for d in self.devices}

    def summary(self) -> str:
        """Describe the step and every device in a few lines of plain text."""
        peak = self.peak_bytes
        lines = [
            f"{self.source} step {self.step_s * 1e3:.4g} ms on {len(self.devices)} devices, "
            f"{self.makespan_s * 1e3:.4g} ms of it until the last action, bubble {self.bubble:.1%}"
        ]
        lines += [
            f"  device {d:3d}  computes {self.busy_s[d] * 1e3:8.4g} ms  "
            f"bubble {self.device_bubble[d]:6.1%}  peak {peak[d] / 2**30:.3f} GiB"
            for d in self.devices
        ]
        return "\n".join(lines)
