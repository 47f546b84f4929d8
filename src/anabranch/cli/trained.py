"""What came of training, as ``train`` says it."""

from __future__ import annotations

from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from anabranch.cli.inputs import note
from anabranch.cli.output import print_json

if TYPE_CHECKING:
    from anabranch.plans.plan import Prediction
    from anabranch.record import Run


def say_run(run: Run, folder: Path, ended: str, *, as_json: bool) -> None:
    """What came of training, and how it was ended, if early."""
    page = str(folder / "report.html")
    if as_json:
        how = {"interrupted": run.interrupted, "run": str(folder), "report": page}
        print_json({**run.figures(), **how})
    else:
        _say_result(run)
        typer.echo(f"report: {page}")
    if ended:
        note(ended)


def _say_result(run: Run) -> None:
    first, last = run.losses[0], sum(run.losses[-10:]) / len(run.losses[-10:])
    rows = [["loss", f"{first:.4f} at first, {last:.4f} over the last steps"]]
    held_out = "held-out " if "loss" in run.metrics else ""
    for name, value in run.metrics.items():
        chance = f" (chance {run.chance[name]:.4g})" if name in run.chance else ""
        rows.append([held_out + name, f"{value:.4f}{chance}"])
    rows += _asynchronous_rows(run) if run.policy else step_rows(run)
    for name, text in rows:
        typer.echo(f"  {name:20s} {text}")


def _asynchronous_rows(run: Run) -> list[list[str]]:
    from anabranch.plans.plan import memory_text

    said = _beside(run.predicted)
    rows = [["policy", run.policy]]
    if run.period_s:
        rows.append(["mini-batch", f"{run.period_s * 1e3:.2f} ms one after the other{said}"])
    behind = ", ".join(map(str, run.version_difference))
    rows.append(["version difference", f"{behind} updates, by stage"])
    versions = ", ".join(map(str, run.peak_versions))
    rows.append(
        [
            "versions of weights",
            f"{versions}, by device; {memory_text(max(run.weight_bytes))} at most",
        ]
    )
    if run.plan.mode == "async":
        rows.append(["peak memory", _unweighed(run)])
    return rows


def step_rows(run: Run) -> list[list[str]]:
    from anabranch.plans.plan import NOT_PREDICTED, memory_text

    predicted = run.predicted
    rows = [["step", f"{run.median_step_s * 1e3:.2f} ms{_beside(predicted)}"]]
    if run.period_s:
        rows.append(["step after step", f"{run.period_s * 1e3:.2f} ms without a barrier between"])
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


def _unweighed(run: Run) -> str:
    """Where the peak is not measured: without a flush, when compiled, in a short run."""
    from anabranch.plans.plan import NOT_PREDICTED, memory_text

    predicted = run.predicted
    if predicted is None or not predicted.device_peak_bytes:
        return f"not measured, {NOT_PREDICTED}"
    return f"not measured, predicted {memory_text(max(predicted.device_peak_bytes))}"


def _beside(predicted: Prediction | None) -> str:
    """What follows a measured time."""
    from anabranch.plans.plan import NOT_PREDICTED

    if predicted is None:
        return f", {NOT_PREDICTED}"
    return f", predicted {predicted.step_s * 1e3:.2f} ms"
