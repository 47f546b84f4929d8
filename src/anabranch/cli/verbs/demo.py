"""The verb ``demo``: the main job from start to end on real data, told in chapters."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from anabranch.cli.output import in_json, print_json
from anabranch.cli.planned_model import gain
from anabranch.cli.settings import LocalPlanSettings
from anabranch.cli.source import ModelSource
from anabranch.cli.spread import spread
from anabranch.cli.training.job import Job
from anabranch.cli.training.local_run import train_job
from anabranch.cli.training.preflight import require_new_run
from anabranch.cli.training.run_results import keep_run
from anabranch.cli.training.training_settings import TrainingSettings
from anabranch.cli.verbs.cluster import calibrate_and_keep, calibration_rows, is_calibrated
from anabranch.plans.plan import Plan, time_text

if TYPE_CHECKING:
    from anabranch.record import Run


@spread
def demo(
    model: str = "glyphs",
    devices: Annotated[int, typer.Option(min=1)] = 4,
    batch_size: Annotated[int, typer.Option(min=1)] = 64,
    steps: Annotated[int, typer.Option(min=1)] = 1500,
    run: Annotated[Path | None, typer.Option("--out")] = None,
) -> None:
    """Capture, measure, plan, verify and train a model.

    Args:
        model: Model to show.
        devices: Local ranks.
        batch_size: Samples of one step.
        steps: Steps to train.
    """
    require_new_run(run)
    began = time.time()
    local = LocalPlanSettings(devices=devices, batch_size=batch_size)
    # For people the story is the result; with --json it goes where progress goes.
    story = _Story(sys.stderr if in_json() else sys.stdout)
    _calibrate(story, devices)
    with story.chapter(f"Capture {model} and its data"):
        job = Job(ModelSource(model, "small"), None)
        parameters = sum(p.numel() for p in job.workload.module.parameters())
        story.say(f"{len(job.captured.graph)} operators, {parameters:,} parameters")
    with story.chapter("Measure its operators on one core"):
        profile = job.measure(batch_size)
        seconds = sum(c.forward_s[-1] + c.backward_s[-1] for c in profile.costs)
        story.say(f"{seconds * 1e3:.1f} ms for {batch_size} samples, forward and backward")
    with story.chapter(f"Plan a graph of stages for {devices} devices"):
        from anabranch.schedule import glossary

        # A core for each device: the prediction that holds where there are enough cores. Without
        # replicas, so that the stages are there to be seen; `anabranch train` allows them.
        search = partial(job.search, local, max_replicas=1, own_cores=True)
        sequential, job.plan = search(planner="sequential"), search(planner="auto")
        story.say(job.plan.summary())
        story.say(glossary(job.plan))
        story.say(gain("sequential", sequential, job.plan) + " predicted")
    with story.chapter("Verify: one step on local ranks against one process"):
        from anabranch.solve import foreseen
        from anabranch.verification import verify

        verified = verify(job.workload, job.plan, captured=job.captured)
        story.say(verified.summary())
    with story.chapter(f"Train {steps} steps on {devices} local ranks"):
        predicted = foreseen(job.plan, profile, job.cluster(devices))[1].step_s
        result = train_job(job, TrainingSettings(steps=steps, check_gradients=False))
        result = replace(result, gradients=verified.summary().splitlines()[0])
    with story.chapter("Predicted against measured"):
        from anabranch.record import new_folder
        from anabranch.record.figures import shown_figures

        folder = run or new_folder("demo", began)
        times = _times(job.plan, predicted, result)
        noted = replace(job.plan, notes=(*job.plan.notes, *times.splitlines()))
        result = keep_run(job, result, folder, plan=noted)
        figures = shown_figures(result.figures())
        story.say("\n".join(f"{figure.name}: {figure.line}" for figure in figures))
        story.say(times)
        story.say(f"picture of one step: {folder / 'timeline.svg'}")
        story.say(f"report: {folder / 'report.html'}")
    from anabranch.files import plan_to_dict

    print_json(
        {
            **result.figures(),
            "plan": plan_to_dict(job.plan),
            "gain_over_sequential": sequential.figures.step_s / job.plan.figures.step_s,
            "max_gradient_error": verified.max_gradient_error,
            "bitwise": verified.bitwise,
            "predicted_own_cores_step_s": job.plan.figures.step_s,
            "predicted_shared_cores_step_s": predicted,
            "seconds": story.seconds,
            "run": folder,
            "picture": folder / "timeline.svg",
            "report": folder / "report.html",
        }
    )


def _calibrate(story: _Story, devices: int) -> None:
    """Measure this machine, unless that was done."""
    if is_calibrated(devices):
        return
    with story.chapter("Calibrate this machine, once"):
        measured, file = calibrate_and_keep()
        story.say("\n".join(calibration_rows(measured)))
        assert measured.calibration is not None
        story.say(measured.calibration.remark)
        story.say(f"kept in {file}")


def _times(plan: Plan, shared_s: float, run: Run) -> str:
    devices, cores = len(plan.stage_graph.devices), os.cpu_count() or 1
    lines = [
        f"predicted step, a core for each of the {devices} ranks: {time_text(plan.figures.step_s)}",
        f"predicted step, on the {cores} cores of this machine: {time_text(shared_s)}",
        f"measured step (median): {time_text(run.median_step_s)}",
    ]
    if devices > cores:
        lines.append(
            f"{devices} ranks take turns on {cores} cores, so no schedule can be faster than the "
            "compute of all of them divided by the cores"
        )
    return "\n".join(lines)


@dataclass
class _Story:
    """Numbered chapters with their seconds."""

    out: Any
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def chapter(self, title: str) -> Iterator[None]:
        self.out.write(f"\n[{len(self.seconds) + 1}] {title}\n")
        self.out.flush()
        started = time.perf_counter()
        yield
        self.seconds[title] = time.perf_counter() - started
        self.out.write(f"    ({self.seconds[title]:.1f} s)\n")
        self.out.flush()

    def say(self, text: str) -> None:
        self.out.write("".join(f"    {line}\n" for line in text.splitlines()))
        self.out.flush()
