"""Rows of a timeline and the boxes in them, in seconds.

Rows are in the order of the branches, so that the devices of one tower lie together::

    device 0 . stage 0   text       [F0][F1]......[B0][B1]
    device 2 . stage 2   text           [F0][F1][B0]..[B1]

    device 1 . stage 1   image      [F0][F1]......[B0][B1]

Neighbours that are narrower than a pixel are drawn as one box in which every kind fills its share
of the height, so that areas stay true. All-reduces run while their device computes, and have a thin
strip of the row for themselves. Updates are in the row itself, as they take the device's time.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

from anabranch.plans.plan import ranges
from anabranch.plans.stages import StageGraph
from anabranch.report.names import branches
from anabranch.schedule.schedule import Action, Kind
from anabranch.timeline import OverheadSpan, Span, SumSpan, Timeline

_Key = TypeVar("_Key", bound=Hashable)
_Timed = TypeVar("_Timed", Span, SumSpan, OverheadSpan)

MERGED_PIXELS = 3
"""Widest box that several actions are drawn as; wider would hide the bubbles between them."""


@dataclass(frozen=True, slots=True)
class Row:
    """One device: its stages (usually one), and the branch that the first of them is in."""

    device: int
    stages: tuple[int, ...]
    branch: int

    @property
    def label(self) -> str:
        """Device and stages in words."""
        plural = "s" if len(self.stages) > 1 else ""
        stage = f" \u00b7 stage{plural} {ranges(self.stages)}" if self.stages else ""
        return f"device {self.device}{stage}"


@dataclass(frozen=True, slots=True)
class Box:
    """One action, or several that are too narrow to be seen apart, by start."""

    spans: tuple[Span, ...]

    @property
    def start(self) -> float:
        return self.spans[0].start

    @property
    def end(self) -> float:
        return max(span.end for span in self.spans)

    def shares(self) -> dict[Kind, float]:
        """Kind -> share of the compute time in the box."""
        seconds: dict[Kind, float] = {}
        for span in sorted(self.spans, key=lambda span: span.action.kind.value != Kind.FORWARD):
            kind = span.action.kind
            seconds[kind] = seconds.get(kind, 0.0) + span.end - span.start
        whole = sum(seconds.values())
        return {k: s / whole if whole else 1 / len(seconds) for k, s in seconds.items()}


@dataclass(frozen=True, slots=True)
class DrawnMessage:
    """A message by both ends; the two spans may be the same interval."""

    sent: Span
    received: Span

    @property
    def start(self) -> float:
        """When it left."""
        return self.sent.start

    @property
    def end(self) -> float:
        """When it had arrived; never before it left, even if two clocks disagree."""
        return max(self.received.end, self.sent.start)

    @property
    def is_forward(self) -> bool:
        """Whether it carries activations."""
        return self.sent.action.kind is Kind.SEND_FORWARD


def rows(timeline: Timeline, graph: StageGraph) -> list[Row]:
    """One row per device, also for those that did nothing; the devices of a branch together."""
    stages: dict[int, set[int]] = {device: set() for device in timeline.devices}
    for s, stage in enumerate(graph.stages):
        for device in stage.devices:
            if device in stages:
                stages[device].add(s)
    for span in timeline.spans:
        stages[span.device].add(span.action.stage)
    branch = branches(graph)
    found = []
    for device, of_device in stages.items():
        known = [branch[s] for s in sorted(of_device) if s < len(branch)]
        found.append(Row(device, tuple(sorted(of_device)), known[0] if known else len(graph)))
    return sorted(found, key=lambda row: (row.branch, row.stages, row.device))


def by_device(timeline: Timeline) -> dict[int, list[Span]]:
    """Device -> its compute, by start."""
    result: dict[int, list[Span]] = {device: [] for device in timeline.devices}
    for span in timeline.spans:
        if span.action.kind.is_compute:
            result[span.device].append(span)
    for spans in result.values():
        spans.sort(key=lambda span: (span.start, span.end))
    return result


def sums_by_device(timeline: Timeline) -> dict[int, list[SumSpan]]:
    """Device -> its all-reduces, by start."""
    result: dict[int, list[SumSpan]] = {device: [] for device in timeline.devices}
    for span in sorted(timeline.sums, key=lambda span: (span.start, span.end)):
        result[span.device].append(span)
    return result


UPDATES = {"update": "update", "gather": "sending what was updated"}
"""What an ``OverheadSpan`` stands for after the gradients are summed -> in words."""


def updates_by_device(timeline: Timeline) -> dict[int, list[OverheadSpan]]:
    """Device -> its updates, and what it sends replicas of them, by start."""
    result: dict[int, list[OverheadSpan]] = {device: [] for device in timeline.devices}
    for span in sorted(timeline.overheads, key=lambda span: (span.start, span.end)):
        if span.what in UPDATES:
            result[span.device].append(span)
    return result


def boxes(spans: Iterable[Span], pixel_s: float) -> Iterator[Box]:
    """Boxes for the actions of one device, sorted by start; a pixel is ``pixel_s`` wide."""
    return map(Box, runs(spans, pixel_s))


def runs(spans: Iterable[_Timed], pixel_s: float) -> Iterator[tuple[_Timed, ...]]:
    """What is drawn as one, of actions or all-reduces by start: neighbours below a pixel, or one
    that is wider.
    """
    run: list[_Timed] = []
    for span in spans:
        narrow = span.end - span.start < pixel_s
        fits = (
            run
            and span.start - run[-1].end < pixel_s
            and span.end - run[0].start < MERGED_PIXELS * pixel_s
        )
        if run and not (narrow and fits):
            yield tuple(run)
            run = []
        if narrow:
            run.append(span)
        else:
            yield (span,)
    if run:
        yield tuple(run)


def messages(timeline: Timeline) -> list[DrawnMessage]:
    """Every message of which both ends were recorded, in the order of the sends."""
    receives: dict[tuple[object, ...], list[Span]] = {}
    for span in timeline.spans:
        action = span.action
        if action.kind in (Kind.RECEIVE_FORWARD, Kind.RECEIVE_BACKWARD):
            ends = action.peer_stage, action.stage, action.peer, span.device
            key = (action.kind.value[1:], *ends, action.start, action.stop)
            receives.setdefault(key, []).append(span)
    found = []
    for span in timeline.spans:
        action = span.action
        if action.kind in (Kind.SEND_FORWARD, Kind.SEND_BACKWARD):
            ends = action.stage, action.peer_stage, span.device, action.peer
            matching = receives.get((action.kind.value[1:], *ends, action.start, action.stop))
            if matching:
                found.append(DrawnMessage(span, matching.pop(0)))
    return sorted(found, key=lambda m: (m.start, m.end, m.sent.device, m.received.device))


def typical(timeline: Timeline) -> dict[Kind, tuple[float, int]]:
    """Kind of compute -> median seconds of one action, and digits of the largest micro-batch."""
    digits: dict[Kind, int] = {}
    for span in timeline.spans:
        kind, number = span.action.kind, str(span.action.microbatch)
        digits[kind] = max(digits.get(kind, 1), len(number))
    return {
        kind: (seconds, digits[kind])
        for kind, seconds in _medians(timeline, lambda action: action.kind).items()
    }


def medians(timeline: Timeline) -> Mapping[tuple[int, Kind], float]:
    """(stage, kind of compute) -> median seconds of one such action."""
    return _medians(timeline, lambda action: (action.stage, action.kind))


def _medians(timeline: Timeline, key: Callable[[Action], _Key]) -> dict[_Key, float]:
    seconds: dict[_Key, list[float]] = {}
    for span in timeline.spans:
        if span.action.kind.is_compute:
            seconds.setdefault(key(span.action), []).append(span.end - span.start)
    return {group: sorted(values)[len(values) // 2] for group, values in seconds.items()}
