"""The demo: the main job from start to end on real data, told as it goes."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anabranch.cli.inputs import Source
from anabranch.cli.options import Preset
from anabranch.cli.output import print_json
from anabranch.cli.planning import against

if TYPE_CHECKING:
    from anabranch.cli.job import Job
    from anabranch.plans.plan import Plan
    from anabranch.record import Run


def show(
    model: str, devices: int, batch_size: int, steps: int, folder: Path, *, as_json: bool
) -> None:
    """Run the demo and print what happens; with ``as_json``, one document at the end."""
    # For people the story is the result; with --json it goes where progress goes.
    story = _Story(sys.stderr if as_json else sys.stdout)
    with story.chapter(f"Capture {model} and its data"):
        from anabranch.cli.job import Job

        job = Job(Source(model, Preset.small), None)
        story.say(f"{len(job.captured.graph)} operators, {_parameters(job):,} parameters")
    with story.chapter("Measure its operators on one core"):
        profile = job.measure(batch_size)
        seconds = sum(c.forward_s[-1] + c.backward_s[-1] for c in profile.costs)
        story.say(f"{seconds * 1e3:.1f} ms for {batch_size} samples, forward and backward")
    with story.chapter(f"Plan a graph of stages for {devices} devices"):
        sequential = _plan(job, devices, batch_size, "sequential")
        job.plan = _plan(job, devices, batch_size, "graphpipe")
        story.say(job.plan.summary())
        story.say(against("the sequential pipeline", sequential, job.plan) + " predicted")
    with story.chapter("Verify: one step on local ranks against one process"):
        from anabranch.verification import verify

        verified = verify(job.workload, job.plan, captured=job.captured)
        story.say(verified.summary())
    with story.chapter(f"Train {steps} steps on {devices} local ranks"):
        predicted = _on_this_machine(job, devices)
        run = job.train(steps, None, check_gradients=False)
        story.say(_results(run))
    with story.chapter("Predicted against measured"):
        times = _times(job.plan, predicted, run)
        noted = replace(job.plan, notes=(*job.plan.notes, *times.splitlines()))
        run = job.keep(replace(run, plan=noted), folder)
        story.say(times)
        story.say(f"picture of one step: {folder / 'timeline.svg'}")
        story.say(f"report: {folder / 'report.html'}")
    if as_json:
        from anabranch.files import plan_to_dict

        print_json(
            {
                **run.figures(),
                "plan": plan_to_dict(job.plan),
                "gain_over_sequential": sequential.figures.step_s / job.plan.figures.step_s,
                "max_gradient_error": verified.max_gradient_error,
                "bitwise": verified.bitwise,
                "predicted_shared_cores_step_s": predicted,
                "seconds": story.seconds,
                "run": str(folder),
                "picture": str(folder / "timeline.svg"),
                "report": str(folder / "report.html"),
            }
        )


def _plan(job: Job, devices: int, batch_size: int, planner: str) -> Plan:
    """Plan for devices with a core each: the prediction that holds where there are enough cores.

    Without replicas, so that the stages are there to be seen; `anabranch train` allows them.
    """
    return job.search(devices, batch_size, None, "auto", 1, planner=planner, own_cores=True)


def _on_this_machine(job: Job, devices: int) -> float:
    """The step that the simulator predicts where the ranks share this machine's cores."""
    from anabranch.cluster import Cluster
    from anabranch.solve import simulate

    assert job.plan is not None
    assert job.profile is not None
    return simulate(job.plan, job.profile, Cluster.preset(f"local:{devices}")).step_s


def _parameters(job: Job) -> int:
    return sum(p.numel() for p in job.workload.module.parameters())


def _results(run: Run) -> str:
    last = run.losses[-20:]
    lines = [f"loss {run.losses[0]:.3f} at first, {sum(last) / len(last):.3f} over the last steps"]
    for name, value in run.metrics.items():
        chance = f", chance {run.chance[name]:.3f}" if name in run.chance else ""
        lines.append(f"held out: {name} {value:.3f}{chance}")
    return "\n".join(lines)


def _times(plan: Plan, shared_s: float, run: Run) -> str:
    devices, cores = len(plan.stage_graph.devices), os.cpu_count() or 1
    lines = [
        f"predicted step, a core for each of the {devices} ranks: "
        f"{plan.figures.step_s * 1e3:.1f} ms",
        f"predicted step, on the {cores} cores of this machine: {shared_s * 1e3:.1f} ms",
        f"measured step (median): {run.median_step_s * 1e3:.1f} ms",
    ]
    if devices > cores:
        lines.append(
            f"{devices} ranks take turns on {cores} cores, so no schedule can be faster than the "
            "compute of all of them divided by the cores; what remains is the cost of taking "
            "turns, of reading the batches and of the optimizer, which the prediction leaves out"
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
