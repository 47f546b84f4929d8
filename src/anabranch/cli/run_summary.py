"""Rows about a run for people, and what is said where it ends early."""

from __future__ import annotations

import sys
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from anabranch.cli.output import note, print_json
from anabranch.cli.settings import TrainingSettings
from anabranch.plans.plan import NOT_PREDICTED, Prediction, memory_text

if TYPE_CHECKING:
    from anabranch.record import Run

INTERRUPTED = 130
"""Exit code of a run that Ctrl-C ended, as shells have it: 128 and the number of the signal."""


def say_run(run: Run, folder: Path, ended: str, *, as_json: bool) -> None:
    """What came of training, and how it was ended, if early."""
    page = str(folder / "report.html")
    if as_json:
        how = {
            "interrupted": run.interrupted,
            "restarts": run.restarts,
            "run": str(folder),
            "report": page,
        }
        print_json({**run.figures(), **how})
    else:
        _say_result(run)
        typer.echo(f"report: {page}")
    if ended:
        note(ended)


def _say_result(run: Run) -> None:
    first, last = run.losses[0], sum(run.losses[-10:]) / len(run.losses[-10:])
    rows = [["loss", f"{first:.4f} at first, {last:.4f} over the last steps"]]
    for name, value in run.metrics.items():
        chance = f" (chance {run.chance[name]:.4g})" if name in run.chance else ""
        rows.append([run.metric_prefix + name, f"{value:.4f}{chance}"])
    if run.restarts:
        rows.append(["restarts", f"{run.restarts}; figures are of the last time"])
    rows += _async_rows(run) if run.policy else step_rows(run)
    for name, text in rows:
        typer.echo(f"  {name:20s} {text}")


def _async_rows(run: Run) -> list[list[str]]:
    said = _beside(run.predicted)
    rows = [["policy", run.policy]]
    if run.period_s:
        rows.append(["mini-batch", f"{run.period_s * 1e3:.2f} ms one after the other{said}"])
    behind = ", ".join(map(str, run.version_difference))
    rows.append(["version difference", f"{behind} updates, by stage"])
    versions = ", ".join(map(str, run.peak_versions))
    most = memory_text(max(run.weight_bytes))
    rows.append(["versions of weights", f"{versions}, by device; {most} at most"])
    if run.plan.mode == "async":
        rows.append(["peak memory", _unweighed(run)])
    return rows


def step_rows(run: Run) -> list[list[str]]:
    predicted = run.predicted
    rows = [["step", f"{run.median_step_s * 1e3:.2f} ms{_beside(predicted)}"]]
    if run.period_s:
        said = ""
        if predicted is not None and predicted.period_s is not None:
            said = f", predicted {predicted.period_s * 1e3:.2f} ms"
        text = f"{run.period_s * 1e3:.2f} ms without a barrier between{said}"
        rows.append(["step after step", text])
    if (times := _compute_ratio(run)) is not None:
        rows.append(["compute", f"{times:.2f} times as long as profiled"])
    if run.ideal_step_s:
        rows.append(["ideal step", f"{run.ideal_step_s * 1e3:.2f} ms for the measured stage times"])
    if run.device_peak_bytes:
        # Of the rank that took most.
        expected = predicted.device_peak_bytes if predicted is not None else ()
        peak, planned = max(zip_longest(run.device_peak_bytes, expected, fillvalue=0))
        also = f"predicted {memory_text(planned)}" if expected else NOT_PREDICTED
        rows.append(["peak memory", f"{memory_text(peak)}, {also}"])
    else:
        rows.append(["peak memory", _unweighed(run)])
    return rows


def _compute_ratio(run: Run) -> float | None:
    """How much longer forwards and backwards took than the profile and calibration say."""
    busy = {title: sum(timeline.busy_s.values()) for title, timeline in run.timelines}
    if not busy.get("predicted") or "measured" not in busy:
        return None
    return busy["measured"] / busy["predicted"]


def _unweighed(run: Run) -> str:
    """Where the peak is not measured: without a flush, when compiled, in a short run."""
    from anabranch.training import WEIGHED_STEP

    predicted, why = run.predicted, ""
    if not run.policy and len(run.losses) < WEIGHED_STEP:
        why = f" (step {WEIGHED_STEP} would be weighed)"
    if predicted is None or not predicted.device_peak_bytes:
        return f"not measured{why}, {NOT_PREDICTED}"
    return f"not measured{why}, predicted {memory_text(max(predicted.device_peak_bytes))}"


def _beside(predicted: Prediction | None) -> str:
    """What follows a measured time."""
    if predicted is None:
        return f", {NOT_PREDICTED}"
    return f", predicted {predicted.step_s * 1e3:.2f} ms"


def say_stopping() -> None:
    """Answer the first Ctrl-C, below a line of progress that may be there."""
    line = "stopping after the step under way; Ctrl-C again stops at once\n"
    sys.stderr.write(("\n" if sys.stderr.isatty() else "") + line)
    sys.stderr.flush()


def say_stopped(save: Path | None) -> None:
    """After the second Ctrl-C: what is there."""
    there = "nothing is kept"
    if save is not None and save.exists():
        from anabranch.checkpoint import newest

        there = f"the checkpoint is {newest(save) or save}"
    sys.stderr.write(f"stopped at once; {there}\n")


def how_to_go_on(run: Run, training: TrainingSettings, out: Path | None) -> str:
    """How far a run came that was ended early, and how to go on; ``out`` as the user named it."""
    done, steps, save = len(run.losses), training.last_step, training.save
    if done == steps:
        return f"interrupted after the last of {steps} steps, before anything was evaluated"
    total = f" of {steps}" if steps is not None else ""
    text = f"interrupted after {done}{total} steps, with a loss of {run.losses[-1]:.4f} at last"
    if save is None:
        return f"{text}; there is no checkpoint, which --save FOLDER would have written"
    left = [f"--resume {save}"]
    if training.epochs is not None:
        left.append(f"--epochs {training.epochs}")
    if steps is not None:
        left.append(f"--steps {steps - done}")
    # Checkpoints of several steps go on in their folder.
    other = ["--save"] * (training.save_every is None) + ["--out"] * (out is not None)
    also = f" and another {' and '.join(other)}" if other else ""
    return f"{text}; to go on, the same command with {' '.join(left)}{also}"
