"""Losses of a run as they become known, and events in the order of their steps.

A loss comes a step late, without a flush several steps; events between steps wait for it::

    trained on   1 2 3 4 . . evaluation at 4 . . 5 6
    told         1 2 3 . . . . . . . . . . . . . 4, evaluation at 4, 5
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from anabranch.errors import TrainingError, naming_line
from anabranch.runtime.asynchronous.pipeline import AsyncPipeline
from anabranch.runtime.pipeline import Pipeline
from anabranch.runtime.reference import num_samples
from anabranch.runtime.state.spare_copies import SpareCopies
from anabranch.training.events import Callback, EndEvent, EvaluationEvent, Event, StepEvent
from anabranch.workload import Batch


class TrainingClock:
    """Clock of wall seconds that stands still between steps."""

    def __init__(self) -> None:
        self._paused_s = 0.0

    def now(self) -> float:
        """Return the seconds of training so far, from an arbitrary start."""
        return time.perf_counter() - self._paused_s

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stop the clock for the time of the context."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self._paused_s += time.perf_counter() - started


class Reporter:
    """Losses so far, and callbacks on the first rank.

    Attributes:
        losses: loss of each step of this run.
        samples: samples in the batch of each step.
        total: steps to do; None if not known.
        first_step: steps that were done before this run.

    Args:
        copies: memory in which losses are noted, so that after a failure the losses of steps that
            are not repeated are known, and no step is told twice.
    """

    def __init__(
        self,
        pipe: Pipeline | AsyncPipeline,
        total: int | None,
        callbacks: Sequence[Callback],
        first_step: int,
        copies: SpareCopies | None = None,
    ) -> None:
        noted = [] if copies is None else copies.losses()
        done = noted[: pipe.step_number - first_step]
        self.losses: list[float] = [loss for loss, _ in done]
        self.samples: list[int] = [samples for _, samples in done]
        self._pipe, self.total, self._copies = pipe, total, copies
        self._callbacks = tuple(callbacks) if pipe.rank == 0 else ()
        self.first_step = first_step
        self._told = 0 if copies is None else copies.reported_steps.value
        # Samples, epoch and learning rate of batches that were read, whose losses are to come.
        self._read: deque[tuple[int, int, float | None]] = deque()
        self._waiting: list[Event] = []

    def noted(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Generate the same batches, and note their figures for the events."""
        for batch in batches:
            self._read.append((num_samples(batch), self._pipe.epoch, self._learning_rate()))
            yield batch

    def _learning_rate(self) -> float | None:
        optimizer = self._pipe.optimizer
        if optimizer is None or not self._callbacks:
            return None
        groups = optimizer.param_groups
        return float(next((g for g in groups if g["params"]), groups[0])["lr"])

    def add(self, loss: float, seconds: float) -> None:
        """Take the loss of the next step, whose batch was noted."""
        self.losses.append(loss)
        done, (samples, epoch, learning_rate) = len(self.losses), self._read.popleft()
        self.samples.append(samples)
        if self._copies is not None and self._pipe.rank == 0 and done > self._told:
            self._copies.note_loss(done - 1, loss, samples)
            self._copies.reported_steps.value = done
        if not self._callbacks:
            return
        event = StepEvent(
            self.first_step + done,
            done,
            self.total,
            epoch,
            loss,
            dict(self._pipe.metrics),
            seconds,
            samples,
            learning_rate,
        )
        if done > self._told:
            self._call(event)
        waiting, self._waiting = self._waiting, []
        for late in waiting:
            self.tell(late)

    def noting(self) -> Callable[[float], None]:
        """Return a function that notes the loss of the last step."""
        copies, index = self._copies, len(self.losses) + len(self._read) - 1
        samples = [*self.samples, *(samples for samples, *_ in self._read)][-1:]

        def note(loss: float) -> None:
            if copies is not None and self._pipe.rank == 0 and samples:
                copies.note_loss(index, loss, samples[0])

        return note

    def tell(self, event: Event) -> None:
        """Tell an event once the loss of its step is known, unless the event or a later step has
        been told before.
        """
        copies = self._copies if isinstance(event, EvaluationEvent | EndEvent) else None
        number = 2 * event.step + isinstance(event, EndEvent)
        is_told = copies is not None and number <= copies.reported_events.value
        if is_told or event.step < self.first_step + self._told:
            return
        if event.step <= self.first_step + len(self.losses):
            if copies is not None and self._pipe.rank == 0:
                copies.reported_events.value = number
            self._call(event)
        else:
            self._waiting.append(event)

    def _call(self, event: Event) -> None:
        for callback in self._callbacks:
            with self._pipe.failing():
                name = getattr(callback, "__qualname__", type(callback).__qualname__)
                what = f"the callback {name} raised at the {event.name} event of step {event.step},"
                with naming_line(what, kind=TrainingError):
                    callback(event)
