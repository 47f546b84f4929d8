"""Where ``train --log`` sends figures: ``jsonl:FILE``, ``csv:FILE``, ``tensorboard:FOLDER``,
``wandb:PROJECT``, ``mlflow:EXPERIMENT``.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from anabranch.errors import TrainingError

if TYPE_CHECKING:
    from anabranch.training import Callback

FILES, FOLDERS, TRACKERS = ("jsonl", "csv"), ("tensorboard",), ("wandb", "mlflow")
"""Kinds of logs, by what stands behind the colon."""


def loggers(texts: Sequence[str]) -> tuple[Callback, ...]:
    """A callback for each text, none of which has opened anything yet.

    Raises:
        typer.BadParameter: if there is no such kind.
        TrainingError: if a package is missing, or a file could not be written.
    """
    split = [_split(text) for text in texts]
    if not split:
        return ()
    from anabranch import training

    makers: dict[str, Callable[[str], Callback]] = {
        "jsonl": training.JsonLines,
        "csv": training.Csv,
        "tensorboard": training.TensorBoard,
        "wandb": lambda project: training.WeightsAndBiases(project=project),
        "mlflow": training.MLflow,
    }
    return tuple(makers[kind](where) for kind, where in split)


def _split(text: str) -> tuple[str, str]:
    kinds = (*FILES, *FOLDERS, *TRACKERS)
    kind, _, where = text.partition(":")
    if kind not in kinds:
        close = difflib.get_close_matches(kind, kinds, 1)
        meant = f"; {close[0]} is meant?" if close else ""
        raise typer.BadParameter(
            f"--log {text}: there is no log {kind!r}{meant} Write jsonl:FILE, csv:FILE, "
            "tensorboard:FOLDER, wandb:PROJECT or mlflow:EXPERIMENT"
        )
    if not where:
        what = "FILE" if kind in FILES else "FOLDER" if kind in FOLDERS else "NAME"
        raise typer.BadParameter(f"--log {text}: say where, {kind}:{what}")
    if kind not in TRACKERS:
        _require_writable(Path(where), is_file=kind in FILES)
    return kind, where


def _require_writable(path: Path, *, is_file: bool) -> None:
    """Raises TrainingError if a file or folder could not be written."""
    there = path if path.exists() else path.absolute().parent
    while not is_file and not there.exists():
        there = there.parent
    why = ""
    if not there.exists():
        why = f"there is no folder {path.parent}; make it first"
    elif path.exists() and path.is_dir() is is_file:
        why = f"{path} is a {'folder' if is_file else 'file'}; name another"
    elif not os.access(there, os.W_OK):
        why = f"{there} cannot be written; name another place"
    if why:
        raise TrainingError(f"--log cannot write {path}: {why}")
