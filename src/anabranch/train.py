"""A ready training loop, which ``anabranch train`` runs on every rank.

It adds progress, evaluation and checkpoints; another loop takes five lines with ``Pipeline``.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import count, islice, pairwise
from pathlib import Path
from typing import Any, TypeVar

from anabranch.checkpoint import MANIFEST, newest
from anabranch.checkpoint.series import is_unused, step_folder
from anabranch.errors import TrainingError
from anabranch.plans.plan import Plan
from anabranch.record import Run
from anabranch.runtime.asynchronous.pipeline import AsyncPipeline
from anabranch.runtime.compute.options import PLAIN
from anabranch.runtime.guards.interrupt import INTERRUPT
from anabranch.runtime.guards.save_clock import SAVE_CLOCK
from anabranch.runtime.pipeline import Pipeline
from anabranch.runtime.reference import num_samples
from anabranch.schedule.schedule import Kind
from anabranch.solve import ideal_step_s
from anabranch.timeline import Timeline
from anabranch.workload import Batch, Workload

_RECORDED = 3
"""Steps of which a timeline is recorded; the one with the median time is kept."""

WEIGHED_STEP = 2 + _RECORDED
"""The step whose peak memory is measured: after one that sets up, and those with a timeline."""


KEPT = 2
"""Checkpoints of a run: the last one, and one before it in case that is damaged."""


@dataclass(frozen=True, slots=True)
class SaveEvery:
    """Checkpoints during training, each in a folder ``step-N`` of the run's; the last step has one.

    Attributes:
        steps: between two of them; None for none by steps.
        seconds: likewise. A checkpoint is written after the step in which it is due, or at the next
            update (``accumulate``).
        keep: how many there are at most.
    """

    steps: int | None = None
    seconds: float | None = None
    keep: int = KEPT

    def __post_init__(self) -> None:
        if min(self.steps or 1, self.seconds or 1.0, self.keep) <= 0:
            raise ValueError(f"{self}: intervals and the number of checkpoints are more than 0")


_SETTLED, _SHOWN = 8, 6
"""Without a flush: losses before a timeline is recorded, and mini-batches that it shows."""


@dataclass(frozen=True, slots=True)
class StepProgress:
    """One step, for whoever watches.

    Attributes:
        step: steps done in this run, from 1.
        total: steps to do, None if that is not known.
        seconds: wall time since the loss before; without a flush 0 while the pipeline fills or
            drains.
    """

    step: int
    total: int | None
    loss: float
    metrics: Mapping[str, float]
    seconds: float
    samples: int


def train(
    workload: Workload,
    plan: Plan,
    *,
    steps: int | None = None,
    epochs: int | None = None,
    resume: Path | None = None,
    weights: Path | None = None,
    save: Path | None = None,
    save_every: SaveEvery | None = None,
    watch: Callable[[StepProgress], None] | None = None,
    **options: Any,
) -> Run:
    """Train this rank's part; call it on every rank.

    Where ``runtime.guards.interrupt`` asks for it, training ends early, behind the same update on
    every rank: what was learned is saved, but not evaluated.

    Args:
        steps: steps to do; by default as many as ``epochs`` have.
        epochs: passes through the data in all; by default as many as ``steps`` need.
        resume: a checkpoint to go on from, or the folder of a run, whose newest it is.
        weights: what ``Pipeline.from_weights`` takes, to begin with.
        save: a new folder for a checkpoint after the last step.
        save_every: when there are checkpoints besides; all are in ``save`` then, which may have
            earlier ones of the run that is resumed.
        watch: called after every step, on the first rank only.
        options: of ``Pipeline``, such as ``captured`` and ``accumulate``.

    Returns:
        What happened, the same on every rank.

    Raises:
        AnabranchError: see ``Pipeline``.
        TrainingError: if ``save`` exists, or a checkpoint cannot be written, or the one to resume
            from has all epochs already.
        ValueError: if neither steps nor epochs are given.
    """
    _require_length(steps, epochs)
    pipe = _begun(Pipeline, resume, weights)(workload, plan, **options)
    require_place(save, resume, is_series=save_every is not None)
    saver = _Saver(pipe, save, save_every)
    log = _Log(pipe, steps, watch)
    seconds: list[float] = []
    recorded: list[Timeline] = []
    batches = saver.between(pipe.batches(epochs=epochs))
    accumulate = int(options.get("accumulate", 1))
    # What is compiled cannot be looked into.
    can_weigh = options.get("compute", PLAIN).backend is None
    # First single steps, whose times and timelines are those of a step alone.
    alone = WEIGHED_STEP if steps is None else min(steps, WEIGHED_STEP)
    for batch in _uninterrupted(islice(batches, alone), 0, accumulate):
        started = time.perf_counter()
        full = num_samples(batch) == plan.stage_graph.batch_size
        # The first step sets things up; a short one would tell nothing about the others.
        record = full and len(log.losses) > 0 and len(recorded) < _RECORDED
        weigh = full and len(recorded) == _RECORDED and can_weigh
        loss = pipe.step(batch, record=record, weigh=weigh)
        taken = time.perf_counter() - started
        # Weighing a step makes it longer.
        if not weigh:
            seconds.append(taken)
        if record and pipe.timeline is not None:
            recorded.append(pipe.timeline)
        log.add(loss, taken, num_samples(batch))
    # The rest follow each other without waiting.
    sizes: deque[int] = deque()
    done = len(log.losses)
    ends = [time.perf_counter()]
    left = islice(batches, None if steps is None else steps - done)
    for loss in pipe.steps(_noted(_uninterrupted(left, done, accumulate), sizes)):
        ends.append(time.perf_counter())
        log.add(loss, ends[-1] - ends[-2], sizes.popleft())
    if not log.losses:
        raise _nothing_done(resume, pipe.epoch, epochs)
    pipe.update()
    recorded.sort(key=lambda timeline: timeline.step_s)
    timeline = recorded[len(recorded) // 2] if recorded else None
    saver.end()
    return _finished(
        pipe,
        workload,
        plan=plan,
        losses=tuple(log.losses),
        step_s=tuple(seconds),
        period_s=_period(ends),
        ideal_step_s=_ideal(plan, timeline) if timeline else 0.0,
        timelines=(("measured", timeline),) if timeline else (),
        device_peak_bytes=pipe.peak_bytes or (),
    )


def train_async(
    workload: Workload,
    plan: Plan,
    *,
    steps: int | None = None,
    epochs: int | None = None,
    resume: Path | None = None,
    weights: Path | None = None,
    save: Path | None = None,
    save_every: SaveEvery | None = None,
    watch: Callable[[StepProgress], None] | None = None,
    **options: Any,
) -> Run:
    """Train this rank's part without a flush; call it on every rank.

    Arguments and errors are those of ``train``, with these differences: a step is a mini-batch, the
    options are those of ``AsyncPipeline``, such as ``policy``, and the losses of the last
    mini-batches come at once, after the drain.

    Returns:
        What happened, the same on every rank but for the times.
    """
    _require_length(steps, epochs)
    pipe = _begun(AsyncPipeline, resume, weights)(workload, plan, **options)
    require_place(save, resume, is_series=save_every is not None)
    saver = _Saver(pipe, save, save_every)
    log = _Log(pipe, steps, watch)
    sizes: deque[int] = deque()
    begun = before = time.perf_counter()
    full: list[float] = []  # when losses came while the pipeline was full
    put_in = 0
    batches = _uninterrupted(islice(saver.between(pipe.batches(epochs=epochs)), steps))
    for loss in pipe.steps(_noted(batches, sizes)):
        now = time.perf_counter()
        taken = 0.0
        if pipe.step_number != put_in:  # otherwise it comes with the drain
            put_in = pipe.step_number
            full.append(now)
            taken = now - before if len(full) > 2 else 0.0
        log.add(loss, taken, sizes.popleft())
        if len(log.losses) == _SETTLED:
            pipe.record(_SHOWN)
        before = now
    if not log.losses:
        raise _nothing_done(resume, pipe.epoch, epochs)
    seconds = [end - start for start, end in pairwise(full)]
    saver.end()
    return _finished(
        pipe,
        workload,
        plan=plan,
        losses=tuple(log.losses),
        step_s=tuple(seconds) or ((before - begun) / len(log.losses),),
        period_s=sum(seconds[1:]) / len(seconds[1:]) if len(seconds) > 1 else 0.0,
        ideal_step_s=0.0,
        policy=pipe.policy.name,
        timelines=(("measured", pipe.timeline),) if pipe.timeline is not None else (),
        version_difference=pipe.version_difference,
        peak_versions=pipe.peak_versions,
        weight_bytes=pipe.weight_bytes,
        round_robin=pipe.is_round_robin,
    )


_Pipe = TypeVar("_Pipe", Pipeline, AsyncPipeline)


def _begun(kind: type[_Pipe], resume: Path | None, weights: Path | None) -> Callable[..., _Pipe]:
    """How the pipeline is made."""
    if resume is not None:
        return partial(kind.resume, resume)
    return kind if weights is None else partial(kind.from_weights, weights)


class _Log:
    """The losses so far, told to whoever watches."""

    def __init__(
        self,
        pipe: Pipeline | AsyncPipeline,
        total: int | None,
        watch: Callable[[StepProgress], None] | None,
    ) -> None:
        self.losses: list[float] = []
        self._pipe, self._total = pipe, total
        self._watch = watch if pipe.rank == 0 else None

    def add(self, loss: float, seconds: float, samples: int) -> None:
        """Note what one step did."""
        self.losses.append(loss)
        if self._watch is not None:
            done, metrics = len(self.losses), self._pipe.metrics
            self._watch(StepProgress(done, self._total, loss, metrics, seconds, samples))


class _Saver:
    """Checkpoints of a run: those that are due, written while it goes on, and the last one."""

    def __init__(
        self, pipe: Pipeline | AsyncPipeline, folder: Path | None, every: SaveEvery | None
    ) -> None:
        self._pipe, self._folder, self._every = pipe, folder, every
        self._saved_at = pipe.step_number
        SAVE_CLOCK.start(every.seconds if every is not None else None, rank=pipe.rank)

    def between(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """The same batches; before each the checkpoint of the step before is begun if it is due."""
        while True:
            self._look()
            if (batch := next(batches, None)) is None:
                return
            yield batch

    def _look(self) -> None:
        """All ranks look between the same steps."""
        if self._every is None or self._folder is None:
            return
        SAVE_CLOCK.look()
        now, steps = self._pipe.step_number, self._every.steps
        by_steps = steps is not None and now // steps > self._saved_at // steps
        is_due = (by_steps or SAVE_CLOCK.is_due) and now > self._saved_at
        if is_due and self._pipe.is_between_updates:
            self._begin(wait=False)

    def end(self) -> None:
        """Keep what was trained before anything else can fail."""
        if self._folder is None:
            return
        if self._every is None:
            self._pipe.save(self._folder)
        elif self._saved_at < self._pipe.step_number:
            self._begin(wait=True)
        self._pipe.finish_saving()

    def _begin(self, *, wait: bool) -> None:
        assert self._folder is not None
        assert self._every is not None
        self._saved_at = self._pipe.step_number
        SAVE_CLOCK.begin()
        folder = step_folder(self._folder, self._saved_at)
        self._pipe.save(folder, wait=wait, keep=self._every.keep)


def _finished(pipe: Pipeline | AsyncPipeline, workload: Workload, **figures: Any) -> Run:
    """Evaluate, unless the run was interrupted."""
    evaluates = workload.eval_data is not None and not INTERRUPT.agreed
    metrics = pipe.evaluate() if evaluates else dict(pipe.metrics)
    chance = dict(workload.chance)
    return Run(metrics=metrics, chance=chance, interrupted=INTERRUPT.agreed, **figures)


def _require_length(steps: int | None, epochs: int | None) -> None:
    if steps is None and epochs is None:
        raise ValueError("give a number of steps or of epochs")


def require_place(folder: Path | None, resumed: Path | None, *, is_series: bool) -> None:
    """Accept the folder for a checkpoint, if any.

    Args:
        resumed: the checkpoint that training goes on from.
        is_series: the folder is for several checkpoints, which may be put beside that one.

    Raises:
        TrainingError: if the folder exists.
    """
    if folder is None or not folder.exists() or (is_series and is_unused(folder)):
        return
    last = newest(folder) if is_series and resumed is not None else None
    if last is None or resumed is None or (folder / MANIFEST).exists():
        raise TrainingError(
            f"{folder} exists; checkpoints are never written over, name a new folder"
        )
    if resumed.resolve() not in (folder.resolve(), last.resolve()):
        raise TrainingError(
            f"{folder} exists, and the checkpoint to resume from, {resumed}, is not the last one "
            "in it; checkpoints are never written over, name a new folder"
        )


def _nothing_done(resume: Path | None, done: int, epochs: int | None) -> TrainingError:
    """Why there was not a single step."""
    if INTERRUPT.agreed:
        return TrainingError("training was asked to end, by Ctrl-C, before it began: start it anew")
    return TrainingError(
        f"nothing is left to do: {resume} has {done} of {epochs} epochs; ask for more"
    )


def _uninterrupted(batches: Iterator[Batch], done: int = 0, accumulate: int = 1) -> Iterator[Batch]:
    """The same batches until training ends early, never between the batches of an update."""
    for step in count(done):
        ends = INTERRUPT.agreed and step % accumulate == 0
        batch = None if ends else next(batches, None)
        if batch is None:
            return
        yield batch


def _noted(batches: Iterable[Batch], sizes: deque[int]) -> Iterator[Batch]:
    """The same batches, whose samples are noted."""
    for batch in batches:
        sizes.append(num_samples(batch))
        yield batch


def _period(ends: list[float]) -> float:
    """Seconds per step in the steady state, 0 for too few steps; losses come a step late."""
    return (ends[-2] - ends[1]) / (len(ends) - 3) if len(ends) > 3 else 0.0


def _ideal(plan: Plan, timeline: Timeline) -> float:
    """The schedule's step for the measured median times of each stage, with links that are free."""
    graph = plan.stage_graph
    spans: dict[tuple[int, Kind, int], list[float]] = defaultdict(list)
    for span in timeline.spans:
        action = span.action
        if action.kind.is_compute:
            replica = graph.stages[action.stage].devices.index(span.device)
            start, stop = graph.slice(action.stage, action.microbatch, replica)
            spans[action.stage, action.kind, stop - start].append(span.end - span.start)
    forward: list[dict[int, float]] = [{} for _ in graph.stages]
    backward: list[dict[int, float]] = [{} for _ in graph.stages]
    for (stage, kind, samples), seconds in spans.items():
        times = (forward if kind.is_forward else backward)[stage]
        # A backward in two halves takes as long as both.
        times[samples] = times.get(samples, 0.0) + statistics.median(seconds)
    return ideal_step_s(plan, forward, backward)
