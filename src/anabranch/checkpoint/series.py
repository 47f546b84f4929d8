"""Checkpoints of one run in one folder, by their steps: ``run/step-100``, ``run/step-200``."""

from __future__ import annotations

import re
from pathlib import Path

from anabranch.checkpoint.manifest import MANIFEST
from anabranch.checkpoint.writing import is_partial, remove

_NAME = re.compile(r"^step-(\d{1,19})$")


def step_folder(series: Path, step: int) -> Path:
    """Where the checkpoint after so many steps is."""
    return series / f"step-{step}"


def step_of(folder: Path) -> int | None:
    """The number in the name of such a folder; None for other names."""
    match = _NAME.match(folder.name)
    return int(match[1]) if match else None


def checkpoints(series: Path) -> list[tuple[int, Path]]:
    """Steps and folders of the complete ones, oldest first."""
    if not series.is_dir():
        return []
    named = ((step_of(path), path) for path in series.iterdir())
    return sorted(
        (step, path) for step, path in named if step is not None and (path / MANIFEST).is_file()
    )


def newest(series: Path) -> Path | None:
    """The checkpoint with the most steps; None if there is none yet."""
    found = checkpoints(series)
    return found[-1][1] if found else None


def keep_newest(series: Path, count: int) -> None:
    """Remove all but so many."""
    for _, folder in checkpoints(series)[:-count]:
        remove(folder)


def is_unused(folder: Path) -> bool:
    """Whether there is nothing in a folder but what killed runs have left."""
    return folder.is_dir() and all(is_partial(path) for path in folder.iterdir())
