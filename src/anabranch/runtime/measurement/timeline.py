"""Measured timelines: starts and ends of the actions of all ranks, gathered afterwards.

In a step, each rank's clock starts at a barrier, so clocks of several machines need not agree.

Without a flush a recording must not stop training, so there is no barrier. Every rank notes some
mini-batches, gathered with the next drain. A rank has all its actions from the first backward of
these mini-batches to their last forward; the timeline shows the time that all ranks have::

    2 to 7 noted    rank 0    F2    F3    F4  | B2 F5 B3 F6 B4 F7 |  B5    B6    B7
                    rank 1          F2 B2 F3  | B3 F4 B4 F5 B5 F6 |  B6 F7 B7
                                              `----- shown -------'
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from time import perf_counter

from anabranch.runtime.compute.outcome import Outcome, Timed
from anabranch.runtime.measurement.clocks import Clock
from anabranch.runtime.ranks.mesh import Mesh
from anabranch.runtime.worker import BatchRun
from anabranch.schedule.schedule import Action, Kind
from anabranch.timeline import Span, Timeline


class StepRecording:
    """A step that is being recorded on all ranks.

    Args:
        begun: time at which this rank began to read its batch, by ``time.perf_counter``.
    """

    def __init__(self, mesh: Mesh, clock: Clock, begun: float) -> None:
        self._mesh, self._clock = mesh, clock
        clock.begin()
        self._lead = perf_counter() - begun
        mesh.barrier()
        self._start = perf_counter()

    def timeline(self, outcome: Outcome) -> Timeline:
        """Return its timeline, once it has ended; all ranks call it together."""
        self._clock.end()
        end = perf_counter()
        return gather_timeline(self._clock, outcome, self._mesh, self._start, end, self._lead)


def gather_timeline(
    clock: Clock, outcome: Outcome, mesh: Mesh, start: float, end: float, lead: float = 0.0
) -> Timeline:
    """Gather the spans of all ranks in one step, from ``start`` to ``end`` on this rank's clock.

    Args:
        lead: seconds of the step before the barrier, in which this rank read its batch; the longest
            of all ranks counts.
    """
    figures, spans = _gathered(mesh, clock, outcome.times, [start, end - start, lead])
    starts, seconds, leads = zip(*figures, strict=True)
    lead = max(leads)
    moved = _moved(spans, mesh, [start - lead for start in starts])
    return Timeline(tuple(moved), mesh.devices, "measured", lead + max(seconds), {})


def _gathered(
    mesh: Mesh, clock: Clock, timed: Iterable[Timed], figures: list[float]
) -> tuple[list[list[float]], list[Span]]:
    """Return some figures of each rank, and the spans of all ranks, each by its rank's clock."""
    rows = [(str(action), *clock.seconds(marks)) for action, marks in timed]
    everybody = mesh.gather([figures, rows])
    spans = [
        Span(device, begun, ended, Action.parse(action))
        for device, (_, rows) in zip(mesh.devices, everybody, strict=True)
        for action, begun, ended in rows
    ]
    return [own for own, _ in everybody], spans


def _moved(spans: Iterable[Span], mesh: Mesh, zeros: Iterable[float]) -> list[Span]:
    """Shift the spans of each rank so that its own zero is at 0."""
    zero = dict(zip(mesh.devices, zeros, strict=True))
    return [
        replace(span, start=span.start - zero[span.device], end=span.end - zero[span.device])
        for span in spans
    ]


_ONE_CLOCK_S = 0.1
"""Clocks whose readings at one moment differ by less are one clock, that of one machine; clocks of
other machines have begun at other times.
"""


@dataclass
class Recording:
    """Actions of one rank for the mini-batches from ``first`` to ``last``."""

    first: int
    last: int
    batch_size: int
    microbatches: int
    clock: Clock
    _done: list[Timed] = field(default_factory=list)

    def note(self, run: BatchRun) -> None:
        """Note the actions of a mini-batch after its update."""
        if not self.first <= run.number <= self.last:
            return
        past = run.number - self.first
        for action, marks in run.outcome.times:
            samples = past * self.batch_size if not action.kind.is_compute else 0
            shifted = replace(
                action,
                microbatch=action.microbatch + past * self.microbatches,
                start=action.start + samples,
                stop=action.stop + samples,
            )
            self._done.append((shifted, marks))

    def timeline(self, mesh: Mesh) -> Timeline | None:
        """Gather the timeline of all ranks; None if there is no time that all have recorded."""
        figures, spans = _gathered(mesh, self.clock, self._done, [perf_counter()])
        now = [own[0] for own in figures]
        if max(now) - min(now) > _ONE_CLOCK_S:
            spans = _moved(spans, mesh, now)
        return _cut(spans, mesh.devices)


def _cut(spans: list[Span], devices: tuple[int, ...]) -> Timeline | None:
    """Cut spans to the time that is common to all devices, and shift its start to 0."""
    begun: dict[int, float] = {}
    ended: dict[int, float] = {}
    for span in spans:
        if span.action.kind is Kind.BACKWARD:
            begun[span.device] = min(begun.get(span.device, span.start), span.start)
        if span.action.kind is Kind.FORWARD:
            ended[span.device] = max(ended.get(span.device, span.end), span.end)
    if len(begun) < len(devices) or len(ended) < len(devices):
        return None
    start, end = max(begun.values()), min(ended.values())
    kept = [
        replace(span, start=span.start - start, end=span.end - start)
        for span in spans
        if start <= span.start and span.end <= end
    ]
    if not kept:
        return None
    kept.sort(key=lambda span: (span.device, span.start, span.end))
    return Timeline(tuple(kept), devices, "measured", end - start, {})
