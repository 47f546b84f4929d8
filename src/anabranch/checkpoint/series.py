"""Checkpoints of one run in one folder, by their steps: ``run/step-100``, ``run/step-200``."""

from __future__ import annotations

import re
from pathlib import Path

from anabranch.checkpoint.manifest import MANIFEST
from anabranch.checkpoint.writing import remove

_NAME = re.compile(r"^step-(\d{1,19})$")


def step_folder(series: Path, step: int) -> Path:
    """Where the checkpoint after so many steps is."""
    return series / f"step-{step}"


def checkpoints(series: Path) -> list[tuple[int, Path]]:
    """Steps and folders of the complete ones, oldest first."""
    if not series.is_dir():
        return []
    named = ((_NAME.match(path.name), path) for path in series.iterdir())
    return sorted(
        (int(match[1]), path) for match, path in named if match and (path / MANIFEST).is_file()
    )


def newest(series: Path) -> Path | None:
    """The checkpoint with the most steps; None if there is none yet."""
    found = checkpoints(series)
    return found[-1][1] if found else None


def keep_newest(series: Path, count: int) -> None:
    """Remove all but so many."""
    for _, folder in checkpoints(series)[:-count]:
        remove(folder)
