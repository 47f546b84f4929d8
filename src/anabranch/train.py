"""A ready training loop: what ``anabranch train`` does on every rank.

It is a user's own loop with progress, evaluation and checkpoints around it; whoever needs another
loop writes it with ``Pipeline`` in five lines.
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
from typing import Any

from anabranch.errors import TrainingError
from anabranch.graph.capture import Captured
from anabranch.plans.plan import Plan
from anabranch.record import Run
from anabranch.runtime.asynchronous.pipeline import AsyncPipeline
from anabranch.runtime.compute.options import PLAIN
from anabranch.runtime.guards.interrupt import INTERRUPT
from anabranch.runtime.pipeline import Pipeline
from anabranch.runtime.reference import num_samples
from anabranch.schedule.schedule import Kind
from anabranch.solve import ideal_step_s
from anabranch.timeline import Timeline
from anabranch.weights import WeightPolicy
from anabranch.workload import Batch, Workload

_RECORDED = 3
"""Steps of which a timeline is recorded; the one with the median time is kept."""

_SETTLED, _SHOWN = 8, 6
"""Without a flush: losses before a timeline is recorded, and mini-batches that it shows."""


@dataclass(frozen=True, slots=True)
class Progress:
    """What one step did, for whoever watches.

    Attributes:
        step: steps done in this run, from 1.
        total: steps to do, None if that is not known.
        loss: of this step.
        metrics: of this step.
        seconds: wall time of this step, or since the loss before; without a flush 0 where that
            tells nothing of a mini-batch: while the pipeline fills, and when it is drained.
        samples: in this step.
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
    captured: Captured | None = None,
    evaluation: Captured | None = None,
    resume: Path | None = None,
    save: Path | None = None,
    watch: Callable[[Progress], None] | None = None,
    **options: Any,
) -> Run:
    """Train this rank's part; call it on every rank.

    Where ``runtime.guards.interrupt`` asks for it, training ends early, behind the same update on
    every rank: what was learned is saved, but not evaluated.

    Args:
        workload: with data.
        plan: one rank per device.
        steps: to do; by default as many as ``epochs`` have.
        epochs: passes through the data in all; by default as many as ``steps`` need.
        captured: the captured module, where the caller has it.
        evaluation: the same in evaluation mode, likewise.
        resume: a checkpoint to go on from.
        save: a new folder for a checkpoint after the last step.
        watch: called after every step, on the first rank only.
        options: of ``Pipeline``, such as ``compute`` and ``accumulate``.

    Returns:
        What happened, the same on every rank.

    Raises:
        AnabranchError: see ``Pipeline``.
        TrainingError: if ``save`` exists, or the checkpoint has all epochs already.
        ValueError: if neither steps nor epochs are given.
    """
    if steps is None and epochs is None:
        raise ValueError("give a number of steps or of epochs")
    make = Pipeline if resume is None else partial(Pipeline.resume, resume)
    pipe = make(
        workload,
        plan,
        captured=captured,
        evaluation=evaluation,
        **options,
    )
    require_new(save)
    losses: list[float] = []
    seconds: list[float] = []
    recorded: list[Timeline] = []
    batches = pipe.batches(epochs=epochs)
    each = int(options.get("accumulate", 1))
    # What is compiled cannot be looked into.
    can_weigh = options.get("compute", PLAIN).backend is None
    # First single steps, whose times and timelines are those of a step alone.
    alone = 2 + _RECORDED
    singly = alone if steps is None else min(steps, alone)
    while len(losses) < singly and not _ends(len(losses), each):
        started = time.perf_counter()
        batch = next(batches, None)
        if batch is None:
            break
        full = num_samples(batch) == plan.stage_graph.batch_size
        # The first step sets things up; a short one would tell nothing about the others.
        record = full and len(losses) > 0 and len(recorded) < _RECORDED
        weigh = full and len(recorded) == _RECORDED and can_weigh
        losses.append(pipe.step(batch, record=record, weigh=weigh))
        taken = time.perf_counter() - started
        # Weighing a step makes it longer.
        if not weigh:
            seconds.append(taken)
        if record and pipe.timeline is not None:
            recorded.append(pipe.timeline)
        if watch is not None and pipe.rank == 0:
            samples = num_samples(batch)
            watch(Progress(len(losses), steps, losses[-1], pipe.metrics, taken, samples))
    # The rest follow each other without waiting.
    sizes: deque[int] = deque()
    left = None if steps is None else steps - len(losses)
    ends = [time.perf_counter()]
    rest = _uninterrupted(islice(batches, left), len(losses), each)
    for loss in pipe.steps(_noted(rest, sizes)):
        ends.append(time.perf_counter())
        losses.append(loss)
        if watch is not None and pipe.rank == 0:
            taken = ends[-1] - ends[-2]
            watch(Progress(len(losses), steps, loss, pipe.metrics, taken, sizes.popleft()))
    if not losses:
        raise _nothing_done(resume, pipe.epoch, epochs)
    pipe.update()
    # What was trained is saved before anything else can fail.
    if save is not None:
        pipe.save(save)
    metrics = dict(pipe.metrics)
    if workload.eval_data is not None and not INTERRUPT.agreed:
        metrics = pipe.evaluate()
    timeline = _median(recorded)
    return Run(
        plan=plan,
        losses=tuple(losses),
        step_s=tuple(seconds),
        period_s=_period(ends),
        ideal_step_s=_ideal(plan, timeline) if timeline else 0.0,
        metrics=metrics,
        chance=dict(workload.chance),
        timelines=(("measured", timeline),) if timeline else (),
        device_peak_bytes=pipe.peak_bytes or (),
        interrupted=INTERRUPT.agreed,
    )


def train_async(
    workload: Workload,
    plan: Plan,
    *,
    policy: WeightPolicy | str | None = None,
    steps: int | None = None,
    epochs: int | None = None,
    captured: Captured | None = None,
    evaluation: Captured | None = None,
    resume: Path | None = None,
    save: Path | None = None,
    watch: Callable[[Progress], None] | None = None,
    **options: Any,
) -> Run:
    """Train this rank's part without a flush; call it on every rank.

    Args:
        workload: with data.
        plan: one stage per device.
        policy: which weights passes read; see ``AsyncPipeline``.
        steps: mini-batches to train on; by default as many as ``epochs`` have.
        epochs: see ``train``; so are the rest.
        captured: see there.
        evaluation: see there.
        resume: see there.
        save: see there.
        watch: see there; the losses of the last mini-batches come at once, after the drain.
        options: of ``AsyncPipeline``, such as ``compute``.

    Returns:
        What happened, the same on every rank but for the times.

    Raises:
        AnabranchError: see ``AsyncPipeline``.
        TrainingError: if ``save`` exists, or the checkpoint has all epochs already.
        ValueError: if neither steps nor epochs are given.
    """
    if steps is None and epochs is None:
        raise ValueError("give a number of steps or of epochs")
    make = AsyncPipeline if resume is None else partial(AsyncPipeline.resume, resume)
    options = {"policy": policy, "captured": captured, "evaluation": evaluation, **options}
    pipe = make(workload, plan, **options)
    require_new(save)
    losses: list[float] = []
    sizes: deque[int] = deque()
    begun = before = time.perf_counter()
    full: list[float] = []  # when losses came while the pipeline was full
    put_in = 0
    batches = _uninterrupted(islice(pipe.batches(epochs=epochs), steps))
    watches = watch is not None and pipe.rank == 0
    for loss in pipe.steps(_noted(batches, sizes) if watches else batches):
        now = time.perf_counter()
        losses.append(loss)
        if len(losses) == _SETTLED:
            pipe.record(_SHOWN)
        taken = 0.0
        if pipe.step_number != put_in:  # otherwise it comes with the drain
            put_in = pipe.step_number
            full.append(now)
            taken = now - before if len(full) > 2 else 0.0
        if watch is not None and sizes:
            samples = sizes.popleft()
            watch(Progress(len(losses), steps, loss, pipe.metrics, taken, samples))
        before = now
    if not losses:
        raise _nothing_done(resume, pipe.epoch, epochs)
    if save is not None:
        pipe.save(save)
    evaluates = workload.eval_data is not None and not INTERRUPT.agreed
    metrics = pipe.evaluate() if evaluates else dict(pipe.metrics)
    seconds = [end - start for start, end in pairwise(full)]
    return Run(
        plan=plan,
        losses=tuple(losses),
        step_s=tuple(seconds) or ((before - begun) / len(losses),),
        period_s=sum(seconds[1:]) / len(seconds[1:]) if len(seconds) > 1 else 0.0,
        ideal_step_s=0.0,
        metrics=metrics,
        chance=dict(workload.chance),
        policy=pipe.policy.name,
        timelines=(("measured", pipe.timeline),) if pipe.timeline is not None else (),
        version_difference=pipe.version_difference,
        peak_versions=pipe.peak_versions,
        weight_bytes=pipe.weight_bytes,
        round_robin=pipe.is_round_robin,
        interrupted=INTERRUPT.agreed,
    )


def require_new(folder: Path | None) -> None:
    """Accept a folder for a checkpoint, if there is to be one.

    Raises:
        TrainingError: if it exists.
    """
    if folder is not None and folder.exists():
        raise TrainingError(
            f"{folder} exists; checkpoints are never written over, name a new folder"
        )


def _nothing_done(resume: Path | None, done: int, epochs: int | None) -> TrainingError:
    """Why there was not a single step."""
    if INTERRUPT.agreed:
        return TrainingError("training was asked to end, by Ctrl-C, before it began: start it anew")
    return TrainingError(
        f"nothing is left to do: {resume} has {done} of {epochs} epochs; ask for more"
    )


def _ends(done: int, accumulate: int) -> bool:
    """Whether training ends early after so many steps; never between the batches of an update."""
    return INTERRUPT.agreed and done % accumulate == 0


def _uninterrupted(batches: Iterator[Batch], done: int = 0, accumulate: int = 1) -> Iterator[Batch]:
    """The same batches until training ends early; none is fetched in vain."""
    for step in count(done):
        batch = None if _ends(step, accumulate) else next(batches, None)
        if batch is None:
            return
        yield batch


def _noted(batches: Iterable[Batch], sizes: deque[int]) -> Iterator[Batch]:
    """The same batches, whose samples are noted."""
    for batch in batches:
        sizes.append(num_samples(batch))
        yield batch


def _period(ends: list[float]) -> float:
    """Seconds per step in the steady state; 0 where there are too few steps to tell.

    Losses come one step late: the first when two steps are done, the last without another step.
    """
    return (ends[-2] - ends[1]) / (len(ends) - 3) if len(ends) > 3 else 0.0


def _median(recorded: list[Timeline]) -> Timeline | None:
    ordered = sorted(recorded, key=lambda timeline: timeline.step_s)
    return ordered[len(ordered) // 2] if ordered else None


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

    def times(kind: Kind) -> list[dict[int, float]]:
        result: list[dict[int, float]] = [{} for _ in graph.stages]
        for (stage, of, samples), seconds in spans.items():
            if of is kind:
                result[stage][samples] = statistics.median(seconds)
        return result

    return ideal_step_s(plan, times(Kind.FORWARD), times(Kind.BACKWARD))
