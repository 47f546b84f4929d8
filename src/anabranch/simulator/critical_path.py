"""The critical path of a step: what its end was waiting for, second by second.

Each event begins when the last thing that it waits for has happened, so a path leads back from the
end of a step to time 0 on which every second has one cause::

    device 0   F0 F1 .  .  .  B0 ...        B0 on device 0 began at 5:
    device 1   .  F0 F1 B0 ..               4-5  message from stage 1 to stage 0
               0  1  2  3  4  5             3-4  B0 on device 1
                                            2-3  F1 on device 1, and so on

A message lasts from the end of the compute that made it to the start of the compute that waited for
it, so queues for links are part of it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter
from typing import NamedTuple

from anabranch.plans.edges import EVERY_EDGE, MessageEdges
from anabranch.plans.stages import StageGraph
from anabranch.schedule.lower import compute_of, needs
from anabranch.schedule.schedule import Action
from anabranch.timeline import Cause, PathSegment, Timeline


class _PathEvent(NamedTuple):
    """A compute, an all-reduce or another occupation of one device."""

    start: float
    end: float
    cause: Cause
    device: int
    stages: tuple[int, ...] = ()
    action: Action | None = None


def critical_path(
    timeline: Timeline, graph: StageGraph, edges: MessageEdges = EVERY_EDGE
) -> list[PathSegment]:
    """Return the critical path of a step, the latest part first, without gaps.

    In a measured step, a compute is taken to have waited for the input that came last.
    """
    return list(_History(timeline, graph, edges).path())


class _History:
    """Events of a step by device, and what computes wait for."""

    def __init__(self, timeline: Timeline, graph: StageGraph, edges: MessageEdges) -> None:
        self._needs, self._step_s = needs(graph, edges), timeline.step_s
        self._near = 1e-9 * timeline.step_s  # seconds that rounding alone can cause
        computes = [
            _PathEvent(s.start, s.end, Cause.COMPUTE, s.device, (s.action.stage,), s.action)
            for s in timeline.spans
            if s.action.kind.is_compute
        ]
        others = [
            _PathEvent(o.start, o.end, _CAUSES.get(o.what, Cause.OVERHEAD), o.device)
            for o in timeline.overheads
        ]
        sums = [
            _PathEvent(s.start, s.end, Cause.ALL_REDUCE, s.device, s.stages) for s in timeline.sums
        ]
        self._busy, self._sums = _by_device((*computes, *others)), _by_device(sums)
        self._members: dict[_PathEvent, list[int]] = defaultdict(list)
        for event in sums:
            self._members[event._replace(device=-1)].append(event.device)
        self._passes = {
            compute_of(event.action, event.device): event
            for event in computes
            if event.action is not None and event.action.kind.has_messages
        }

    def path(self) -> Iterator[PathSegment]:
        """Generate the path from the end of the step to its beginning."""
        everyone, time = {*self._busy, *self._sums}, self._step_s
        device = self._latest(everyone, time)
        while time > self._near:
            event, ended = self._last(device, time)
            if ended < time - self._near:  # idle: it waits for other devices
                device = self._latest(everyone, time)
                event, ended = self._last(device, time)
                if ended < time:
                    yield PathSegment(ended, time, Cause.OVERHEAD, (), device)
                    time = ended
                    continue
            assert event is not None
            yield PathSegment(event.start, time, event.cause, event.stages, event.device)
            time = event.start
            if event.cause is Cause.ALL_REDUCE:
                device = self._latest(self._members[event._replace(device=-1)], time)
            elif event.action is not None and self._last(device, time)[1] < time - self._near:
                source = max(self._awaited(event), key=attrgetter("end"), default=None)
                if source is not None and source.end < time:
                    ends = source.stages + event.stages
                    yield PathSegment(source.end, time, Cause.MESSAGE, ends, device)
                    time = source.end
                device = source.device if source is not None else device

    def _last(self, device: int, time: float) -> tuple[_PathEvent | None, float]:
        """Return the last event of a device that began before a time, and until when it was busy by
        then; of two events the one that ends later, compute before an all-reduce beside it.
        """
        candidates: list[_PathEvent] = []
        for events in (self._busy.get(device, ()), self._sums.get(device, ())):
            last = bisect_left(events, time, key=attrgetter("start")) - 1
            candidates += events[last : last + 1] if last >= 0 else []
        event = max(candidates, key=lambda event: min(event.end, time), default=None)
        return event, min(event.end, time) if event else 0.0

    def _latest(self, devices: Iterable[int], time: float) -> int:
        """Return the device that was busy last before a time."""
        return max(sorted(devices), key=lambda device: self._last(device, time)[1], default=-1)

    def _awaited(self, event: _PathEvent) -> list[_PathEvent]:
        """Return the computes of other stages whose values or gradients a compute needs."""
        assert event.action is not None
        compute = compute_of(event.action, event.device)
        needed = self._needs.get(compute, ())
        return [self._passes[other] for other in needed if other in self._passes]


_CAUSES = {"agreement": Cause.AGREEMENT, "update": Cause.UPDATE, "gather": Cause.GATHER}


def _by_device(events: Iterable[_PathEvent]) -> dict[int, Sequence[_PathEvent]]:
    """Return the events of each device, ascending, without those of no length."""
    by_device: dict[int, list[_PathEvent]] = defaultdict(list)
    for event in sorted(events, key=attrgetter("start", "end")):
        if event.end > event.start:
            by_device[event.device].append(event)
    return dict(by_device)
