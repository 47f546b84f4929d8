"""The training loop, with a flush and without."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from anabranch.plans.plan import Plan
from anabranch.record import RECORDED_STEPS, WEIGHED_STEP, Run
from anabranch.runtime.asynchronous.pipeline import AsyncPipeline
from anabranch.runtime.pipeline import Pipeline
from anabranch.schedule.schedule import Kind
from anabranch.solve import ideal_step_s
from anabranch.timeline import Timeline
from anabranch.training.adaptation import Adaptation, Looks
from anabranch.training.events import Callback
from anabranch.training.save_every import SaveEvery
from anabranch.training.step_loop import StepLoop
from anabranch.training.training_run import TrainingRun
from anabranch.workload import Workload

_SETTLED, _SHOWN = 8, 6
"""Without a flush: losses before a timeline is recorded, and mini-batches in it."""


def train(
    workload: Workload,
    plan: Plan,
    *,
    steps: int | None = None,
    epochs: int | None = None,
    resume: str | Path | None = None,
    weights: str | Path | None = None,
    save: str | Path | None = None,
    save_every: SaveEvery | None = None,
    evaluate_every: int | None = None,
    callbacks: Sequence[Callback] = (),
    looks: Looks | None = None,
    **options: Any,
) -> Run:
    """Train this rank's part; call it on every rank.

    If ``runtime.guards.interrupt`` asks for it, training ends early, behind the same update on
    every rank: the weights are saved, but evaluated only if ``evaluate_every`` says so.

    Args:
        steps: steps to do; by default as many as ``epochs`` have. With 0 the held-out data is
            evaluated, and nothing is trained.
        epochs: passes through the data in all; by default as many as ``steps`` need.
        resume: a checkpoint to go on from, or the folder of a run, for its newest checkpoint.
        weights: weights to begin with, as ``Pipeline.from_weights`` takes them.
        save: a new folder for a checkpoint after the last step.
        save_every: times of further checkpoints (``training.SaveEvery``); ``save`` then has all of
            them, and may have earlier ones of the run that is resumed.
        evaluate_every: steps between evaluations of the held-out data during training; by default
            it is evaluated only at the end.
        callbacks: called with every event (``training.events``), on the first rank only.
        looks: comparisons of devices and links with the prediction; by default there are none.
        options: options of ``Pipeline``, such as ``captured``, ``accumulate`` and ``copies``. With
            ``copies`` the state is copied every few steps, and if there is a copy, training goes on
            from it as if nothing had happened since. Also ``on_trained``, called on the first rank
            with the run behind its last step, before checkpoint and evaluation, which may fail.

    Returns:
        The run, the same on every rank.

    Raises:
        AnabranchError: see ``Pipeline``.
        TrainingError: if ``save`` exists, or a checkpoint cannot be written, or the one to resume
            from has all epochs already, or a callback raised.
        DataError: if ``evaluate_every`` is given, or ``steps`` is 0, and there is no held-out data.
        ValueError: if neither steps nor epochs are given, or ``evaluate_every`` is less than 1.
        TypeError: for an argument that neither this function nor ``Pipeline`` has.
    """
    training = TrainingRun(
        Pipeline,
        workload,
        plan,
        steps=steps,
        epochs=epochs,
        resume=resume,
        weights=weights,
        save=save,
        save_every=save_every,
        evaluate_every=evaluate_every,
        callbacks=callbacks,
        **options,
    )
    pipe, reporter = training.pipe, training.reporter
    loop = StepLoop(pipe, reporter, training.clock, training.batches)
    # First single steps, for times and timelines of a step alone. Compiled programs cannot be
    # weighed.
    loop.alone(WEIGHED_STEP, weighs=pipe.options.compute.backend is None)
    looks = looks or Looks(every=None)
    adaptation = Adaptation(loop, looks, training.start_s)
    adaptation.look()
    # The other steps follow each other without waiting.
    while loop.in_a_row(looks.steps_until(len(reporter.losses), pipe.options.accumulate)):
        if not loop.alone(RECORDED_STEPS):
            break
        adaptation.look()
    training.require_steps()
    pipe.update()
    timeline = loop.timeline
    return training.finished(
        plan=pipe.plan,
        step_s=loop.step_s,
        period_s=loop.period_s,
        ideal_step_s=_ideal(pipe.plan, timeline) if timeline else 0.0,
        timelines=(("measured", timeline),) if timeline else (),
        device_peak_bytes=loop.peak_bytes,
        stragglers=adaptation.slow,
        plan_changes=tuple(adaptation.changes),
    )


def train_async(workload: Workload, plan: Plan, **arguments: Any) -> Run:
    """Train this rank's part without a flush; call it on every rank.

    Arguments and errors are those of ``train``, with these differences: a step is a mini-batch,
    there are no ``looks``, the options are those of ``AsyncPipeline``, such as ``policy``, and the
    losses of the last mini-batches come at once, after the drain.

    Returns:
        The run, the same on every rank except for its times.
    """
    training = TrainingRun(AsyncPipeline, workload, plan, **arguments)
    pipe, reporter, clock = training.pipe, training.reporter, training.clock
    begun = before = clock.now()
    full: list[float] = []  # times of losses while the pipeline was full
    put_in = 0
    for loss in pipe.steps(reporter.noted(training.batches)):
        now = clock.now()
        taken = 0.0
        if pipe.step_number != put_in:  # else the loss comes with the drain
            put_in = pipe.step_number
            full.append(now)
            taken = now - before if len(full) > 2 else 0.0
        reporter.add(loss, taken)
        if len(reporter.losses) == _SETTLED:
            pipe.record(_SHOWN)
        before = now
    training.require_steps()
    seconds = [end - start for start, end in pairwise(full)]
    return training.finished(
        plan=plan,
        step_s=tuple(seconds) or tuple((before - begun) / len(full) for _ in full[:1]),
        period_s=sum(seconds[1:]) / len(seconds[1:]) if len(seconds) > 1 else 0.0,
        ideal_step_s=0.0,
        policy=pipe.policy.name,
        timelines=(("measured", pipe.timeline),) if pipe.timeline is not None else (),
        version_difference=pipe.version_difference,
        peak_versions=pipe.peak_versions,
        weight_bytes=pipe.weight_bytes,
        round_robin=pipe.is_round_robin,
    )


def _ideal(plan: Plan, timeline: Timeline) -> float:
    """Return the step of the schedule for the median times of each stage and links without cost."""
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
