"""A measured timeline of some mini-batches, while the pipeline is full.

Nothing may stand still for it, so there is no barrier to start clocks at. Every rank notes when its
actions began and ended, and the figures are gathered with the next drain. A rank that has noted
some mini-batches has all that it did from the first backward of them to their last forward; shown
is the time for which all ranks have that::

    2 to 7 noted    rank 0    F2    F3    F4  | B2 F5 B3 F6 B4 F7 |  B5    B6    B7
                    rank 1          F2 B2 F3  | B3 F4 B4 F5 B5 F6 |  B6 F7 B7
                                              `----- shown -------'
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, replace

from anabranch.runtime import texts
from anabranch.runtime.measurement.clocks import Clock, Mark
from anabranch.runtime.mesh import Mesh
from anabranch.runtime.worker import BatchRun
from anabranch.schedule.schedule import Action, Kind
from anabranch.timeline import Span, Timeline

_ONE_CLOCK_S = 0.1
"""Clocks that show the same time at the same moment, but for so much, are one: those of other
machines began when these did.
"""


@dataclass
class Recording:
    """Actions of one rank for the mini-batches from ``first`` to ``last``."""

    first: int
    last: int
    batch_size: int
    microbatches: int
    clock: Clock

    def __post_init__(self) -> None:
        self._done: list[tuple[Action, Mark, Mark]] = []

    def note(self, run: BatchRun) -> None:
        """Note the actions of a mini-batch after its update."""
        if not self.first <= run.number <= self.last:
            return
        past = run.number - self.first
        for action, (start, end) in zip(run.actions, run.outcome.times, strict=True):
            samples = past * self.batch_size if not action.kind.is_compute else 0
            shifted = replace(
                action,
                microbatch=action.microbatch + past * self.microbatches,
                start=action.start + samples,
                stop=action.stop + samples,
            )
            self._done.append((shifted, start, end))

    def timeline(self, mesh: Mesh) -> Timeline | None:
        """Gather the timeline of all ranks; None without a time that all have recorded."""
        rows = [(str(action), *self.clock.seconds(marks)) for action, *marks in self._done]
        documents = texts.gather(json.dumps([time.perf_counter(), rows]))
        now, gathered = zip(*map(json.loads, documents), strict=True)
        zero = now if max(now) - min(now) > _ONE_CLOCK_S else [0.0] * len(now)
        spans = [
            Span(device, start - origin, end - origin, Action.parse(action))
            for device, rows, origin in zip(mesh.devices, gathered, zero, strict=True)
            for action, start, end in rows
        ]
        return _cut(spans, mesh.devices)


def _cut(spans: list[Span], devices: tuple[int, ...]) -> Timeline | None:
    """Cut spans to the time that all devices have in common, which then begins at 0."""
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
