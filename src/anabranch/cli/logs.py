"""Logs of ``train --log``: ``jsonl:FILE``, ``csv:FILE``, ``tensorboard:FOLDER``,
``wandb:PROJECT``, ``mlflow:EXPERIMENT``.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from anabranch.cli.output import file_to_write, folder_to_write

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
        (file_to_write if kind in FILES else folder_to_write)(Path(where))
    return kind, where
