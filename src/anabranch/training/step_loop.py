"""Steps of a run with a flush, alone and in a row, and their measurements."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import islice

from anabranch.record import RECORDED_STEPS
from anabranch.runtime.pipeline import Pipeline
from anabranch.runtime.reference import num_samples
from anabranch.timeline import Timeline
from anabranch.training.reporter import Reporter, TrainingClock
from anabranch.workload import Batch

_MOST_KEPT = 10 * RECORDED_STEPS
"""Timelines of the latest looks that are kept, to show the median one: where ranks share cores,
single steps differ by a third. Each holds the spans of a step.
"""


class StepLoop:
    """Steps of a run, one alone or many in a row, and measurements of the present plan.

    Attributes:
        seconds: seconds of each step alone, also of the first, which sets things up.
        recorded: timelines of the last steps that were recorded together.
        peak_bytes: peak bytes of the weighed step, per device.
    """

    def __init__(
        self, pipe: Pipeline, reporter: Reporter, clock: TrainingClock, batches: Iterator[Batch]
    ) -> None:
        self.pipe, self.reporter, self._clock = pipe, reporter, clock
        self._batches = reporter.noted(batches)
        self.seconds: list[float] = []
        self.begin_anew()

    def begin_anew(self) -> None:
        """Forget the measurements of another plan."""
        self._earlier, self.seconds = self.seconds, []
        self.recorded: list[Timeline] = []
        self._timelines: deque[Timeline] = deque(maxlen=_MOST_KEPT)
        self.peak_bytes: tuple[int, ...] = ()
        self._in_a_row: list[list[float]] = []

    def alone(self, count: int, *, weighs: bool = False) -> bool:
        """Make ``count`` steps; return True if there may be more."""
        pipe, done = self.pipe, 0
        recorded: list[Timeline] = []
        for batch in islice(self._batches, count):
            started = self._clock.now()
            full = num_samples(batch) == pipe.plan.stage_graph.batch_size
            # The first step sets things up; a step of a short batch is no measure of the others.
            record = full and bool(self.seconds) and len(recorded) < RECORDED_STEPS
            weigh = weighs and full and len(recorded) == RECORDED_STEPS
            loss = pipe.step(batch, record=record, weigh=weigh)
            taken = self._clock.now() - started
            # Weighing a step makes it longer.
            if not weigh:
                self.seconds.append(taken)
            if record and pipe.timeline is not None:
                recorded.append(pipe.timeline)
            self.reporter.add(loss, taken)
            done += 1
        if weighs:
            self.peak_bytes = pipe.peak_bytes or ()
        self.recorded = recorded or self.recorded
        self._timelines += recorded
        return done == count

    def in_a_row(self, count: int | None) -> bool:
        """Make ``count`` steps, by default all; return True if there may be more."""
        ends = [self._clock.now()]
        for loss in self.pipe.steps(islice(self._batches, count)):
            ends.append(self._clock.now())
            self.reporter.add(loss, ends[-1] - ends[-2])
        self._in_a_row.append(ends)
        return len(ends) - 1 == count

    @property
    def step_s(self) -> tuple[float, ...]:
        """Seconds of each step alone; of the previous plan, if this one has none."""
        return tuple(self.seconds or self._earlier)

    @property
    def timeline(self) -> Timeline | None:
        """Timeline of the step with the median time."""
        ordered = sorted(self._timelines, key=lambda timeline: timeline.step_s)
        return ordered[len(ordered) // 2] if ordered else None

    @property
    def period_s(self) -> float:
        """Seconds per step in the steady state, 0 for too few steps; losses come a step late."""
        rows = [ends for ends in self._in_a_row if len(ends) > 3]
        count = sum(len(ends) - 3 for ends in rows)
        return sum(ends[-2] - ends[1] for ends in rows) / count if count else 0.0
