"""Checkpoints of one run in one folder, by their steps: ``run/step-100``, ``run/step-200``.

If asked for, the link ``run/best`` leads to the checkpoint with the best evaluation so far;
``evaluation.json`` in it has the held-out means.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Literal

from pydantic import Field

from anabranch.checkpoint.manifest import MANIFEST
from anabranch.checkpoint.writing import is_partial, remove
from anabranch.errors import FileFormatError, TrainingError
from anabranch.files.jsonfile import Strict, read_document, write_document

BEST = "best"
_EVALUATION, _SCHEMA = "evaluation.json", "anabranch.evaluation/1"


class _EvaluationFile(Strict):
    schema_: Literal["anabranch.evaluation/1"] = Field(alias="schema")
    metrics: dict[str, float]


_NAME = re.compile(r"^step-(\d{1,19})$")


def step_folder(series: Path, step: int) -> Path:
    """Return the folder of the checkpoint after a number of steps."""
    return series / f"step-{step}"


def step_of(folder: Path) -> int | None:
    """Return the number of steps in the name of a checkpoint's folder; None for other names."""
    match = _NAME.match(folder.name)
    return int(match[1]) if match else None


def checkpoints(series: Path) -> list[tuple[int, Path]]:
    """Return steps and folders of the complete checkpoints, oldest first."""
    if not series.is_dir():
        return []
    named = ((step_of(path), path) for path in series.iterdir())
    return sorted(
        (step, path) for step, path in named if step is not None and (path / MANIFEST).is_file()
    )


def newest(series: Path) -> Path | None:
    """Return the checkpoint with the most steps; None if there is none yet."""
    saved = checkpoints(series)
    return saved[-1][1] if saved else None


def keep_newest(series: Path, count: int) -> None:
    """Remove all checkpoints but the newest ``count`` and the best."""
    best = (series / BEST).resolve()
    for _, folder in checkpoints(series)[:-count]:
        if folder.resolve() != best:
            remove(folder)


def mark_best(folder: Path, metrics: Mapping[str, float]) -> None:
    """Let the link ``best`` lead to a complete checkpoint, and note its held-out means in it.

    Raises:
        TrainingError: if the file system refuses.
    """
    finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
    fresh = folder.with_name(f".{BEST}.link")
    try:
        write_document(folder / _EVALUATION, {"schema": _SCHEMA, "metrics": finite})
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(folder.name)
        fresh.rename(folder.with_name(BEST))
    except OSError as error:
        raise TrainingError(
            f"{folder} is the best checkpoint so far, but cannot be marked as such: {error}; leave "
            "the best checkpoint out, or save to a file system that has links"
        ) from error


def best_evaluation(series: Path) -> dict[str, float]:
    """Return the held-out means of the best checkpoint; empty if there are none, or unreadable."""
    with suppress(FileFormatError):
        return read_document(series / BEST / _EVALUATION, _SCHEMA, _EvaluationFile).metrics
    return {}


def is_unused(folder: Path) -> bool:
    """Return True if a folder holds nothing but unfinished checkpoints of killed runs."""
    return folder.is_dir() and all(is_partial(path) for path in folder.iterdir())
