"""Texts about a run: its figures, the answers to Ctrl-C, and how to go on."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from anabranch.cli.output import note, print_json, print_rows
from anabranch.cli.training_settings import TrainingSettings

if TYPE_CHECKING:
    from anabranch.record import Run


def say_run(run: Run, folder: Path, ended: str, *, as_json: bool) -> None:
    """Print the figures of a run, and its end if that was early."""
    page = folder / "report.html"
    if as_json:
        how = {"interrupted": run.interrupted, "run": folder, "report": page}
        print_json({**run.figures(), **how})
    else:
        say_figures(run)
        typer.echo(f"report: {page}")
    if ended:
        note(ended)


def say_figures(run: Run, more: Sequence[tuple[str, str]] = ()) -> None:
    """The figures and what else there is, a row each; a terminal that is too narrow wraps them."""
    from anabranch.record.figures import told

    print_rows([*((figure.name, figure.line) for figure in told(run.figures())), *more])


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
    """Progress of a run that was ended early, and the options that go on; ``out`` as the user named
    it.
    """
    done, steps, save = len(run.losses), training.last_step, training.save
    counted = "step" if (steps or done) == 1 else "steps"
    if done == steps:
        return f"interrupted after the last of {steps} {counted}, before anything was evaluated"
    total = f" of {steps}" if steps is not None else ""
    text = f"interrupted after {done}{total} {counted}, with a loss of {run.losses[-1]:.4f} at last"
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
