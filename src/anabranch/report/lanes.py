"""Rows of a timeline and the boxes in them, in seconds.

Rows are in the order of the branches, so that the devices of one tower lie together::

    device 0 . stage 0   text       [F0][F1]......[B0][B1]
    device 2 . stage 2   text           [F0][F1][B0]..[B1]

    device 1 . stage 1   image      [F0][F1]......[B0][B1]

All-reduces run while their device computes, and have a thin strip of the row of their own. Updates
are in the row itself, as they take the device's time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from anabranch.plans.plan import ranges
from anabranch.plans.stages import StageGraph
from anabranch.report.names import branches
from anabranch.schedule.schedule import Action, Kind
from anabranch.timeline import OverheadSpan, Span, SumSpan, Timeline

_Key = TypeVar("_Key", bound=Hashable)
TimedSpan = TypeVar("TimedSpan", Span, SumSpan, OverheadSpan)


UPDATES = {"update": "update", "gather": "sending what was updated"}
"""Kinds of ``OverheadSpan`` after the all-reduce -> text."""


@dataclass(frozen=True, slots=True)
class DeviceRow:
    """The row of a device.

    Attributes:
        stages: stages of the device, usually one.
        branch: branch of its first stage.
        computes, messages, sums, updates: computes, sends and receives, all-reduces, and updates
            with their all-gathers, each sorted by start.
    """

    device: int
    stages: tuple[int, ...]
    branch: int
    computes: Sequence[Span]
    messages: Sequence[Span]
    sums: Sequence[SumSpan]
    updates: Sequence[OverheadSpan]

    def tone(self, stage: int) -> int:
        """Return the tone of a stage, from 0 for the first one of the device to 3, the palest."""
        return min(self.stages.index(stage), 3)

    @property
    def label(self) -> str:
        """Device and stages as text."""
        plural = "s" if len(self.stages) > 1 else ""
        stage = f" \u00b7 stage{plural} {ranges(self.stages)}" if self.stages else ""
        return f"device {self.device}{stage}"


@dataclass(frozen=True, slots=True)
class DrawnMessage:
    """A message with the spans of its send and its receive, which may be equal."""

    sent: Span
    received: Span

    @property
    def start(self) -> float:
        return self.sent.start

    @property
    def end(self) -> float:
        """End of the receive, but not before the send, even if two clocks disagree."""
        return max(self.received.end, self.sent.start)

    @property
    def is_forward(self) -> bool:
        """True for activations, False for gradients."""
        return self.sent.action.kind is Kind.SEND_FORWARD


def rows(timeline: Timeline, graph: StageGraph) -> list[DeviceRow]:
    """Return a row per device, also of idle ones; the devices of a branch are adjacent."""
    stages: dict[int, set[int]] = {device: set() for device in timeline.devices}
    for s, stage in enumerate(graph.stages):
        for device in stage.devices:
            if device in stages:
                stages[device].add(s)
    for span in timeline.spans:
        stages[span.device].add(span.action.stage)
    branch = branches(graph)
    computes = _by_device(span for span in timeline.spans if span.action.kind.is_compute)
    messages = _by_device(span for span in timeline.spans if not span.action.kind.is_compute)
    sums = _by_device(timeline.sums)
    updates = _by_device(span for span in timeline.overheads if span.what in UPDATES)
    result = []
    for device, numbers in stages.items():
        known = [branch[s] for s in sorted(numbers) if s < len(branch)]
        first = known[0] if known else len(graph)
        spans = computes[device], messages[device], sums[device], updates[device]
        result.append(DeviceRow(device, tuple(sorted(numbers)), first, *spans))
    return sorted(result, key=lambda row: (row.branch, row.stages, row.device))


def _by_device(spans: Iterable[TimedSpan]) -> Mapping[int, list[TimedSpan]]:
    """Group spans by device, sorted by start."""
    result: dict[int, list[TimedSpan]] = defaultdict(list)
    for span in sorted(spans, key=lambda span: (span.start, span.end)):
        result[span.device].append(span)
    return result


def messages(timeline: Timeline) -> list[DrawnMessage]:
    """Return the messages with recorded send and receive, in the order of the sends."""
    receives: dict[tuple[object, ...], list[Span]] = {}
    for span in timeline.spans:
        action = span.action
        if action.kind in (Kind.RECEIVE_FORWARD, Kind.RECEIVE_BACKWARD):
            ends = action.peer_stage, action.stage, action.peer, span.device
            key = (action.kind.value[1:], *ends, action.start, action.stop)
            receives.setdefault(key, []).append(span)
    result = []
    for span in timeline.spans:
        action = span.action
        if action.kind in (Kind.SEND_FORWARD, Kind.SEND_BACKWARD):
            ends = action.stage, action.peer_stage, span.device, action.peer
            matching = receives.get((action.kind.value[1:], *ends, action.start, action.stop))
            if matching:
                result.append(DrawnMessage(span, matching.pop(0)))
    return sorted(result, key=lambda m: (m.start, m.end, m.sent.device, m.received.device))


def typical(timeline: Timeline) -> dict[Kind, tuple[float, int]]:
    """Map kinds of compute to their median seconds and the digits of the last micro-batch."""
    digits: dict[Kind, int] = {}
    for span in timeline.spans:
        kind, number = span.action.kind, str(span.action.microbatch)
        digits[kind] = max(digits.get(kind, 1), len(number))
    return {
        kind: (seconds, digits[kind])
        for kind, seconds in _medians(timeline, lambda action: action.kind).items()
    }


def medians(timeline: Timeline) -> Mapping[tuple[int, Kind], float]:
    """Map (stage, kind of compute) to median seconds."""
    return _medians(timeline, lambda action: (action.stage, action.kind))


def _medians(timeline: Timeline, key: Callable[[Action], _Key]) -> dict[_Key, float]:
    seconds: dict[_Key, list[float]] = {}
    for span in timeline.spans:
        if span.action.kind.is_compute:
            seconds.setdefault(key(span.action), []).append(span.end - span.start)
    return {group: sorted(values)[len(values) // 2] for group, values in seconds.items()}
