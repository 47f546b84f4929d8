"""Times and folders of a run's checkpoints.

::

    run/step-400   checkpoints; only the newest few are kept
    run/step-600
    run/best       a link to the checkpoint with the best evaluation, which is kept as well
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from anabranch.checkpoint import MANIFEST, newest
from anabranch.checkpoint.series import is_unused
from anabranch.errors import TrainingError

KEPT = 2
"""Checkpoints that a run keeps: the last one, and the one before it in case that is damaged."""


@dataclass(frozen=True, slots=True)
class SaveEvery:
    """Checkpoints during training, each in a folder ``step-N`` of the run; the last step has one.

    Attributes:
        steps: steps between two checkpoints; None for no interval in steps.
        seconds: seconds between two checkpoints; None for no interval in seconds. A checkpoint is
            written after the step in which it is due, or at the next update (``accumulate``).
        keep: most checkpoints that are kept besides the best.
        best: a held-out mean by which evaluations are compared: ``loss``, of which less is better,
            or ``NAME:max`` or ``NAME:min``. After the best evaluation so far a checkpoint is
            written, the link ``best`` leads to it, and it is kept however many follow. Empty for
            none.

    Raises:
        ValueError: if an interval is not more than 0, or ``best`` does not say what is better.
    """

    steps: int | None = None
    seconds: float | None = None
    keep: int = KEPT
    best: str = ""

    def __post_init__(self) -> None:
        intervals = (self.steps, self.seconds, self.keep)
        if any(interval is not None and interval <= 0 for interval in intervals):
            raise ValueError(f"{self}: intervals and the number of checkpoints are more than 0")
        if self.best not in ("", "loss") and self.best.partition(":")[2] not in ("min", "max"):
            raise ValueError(
                f"best {self.best}: say whether more or less of it is better, {self.best}:max or "
                f"{self.best}:min"
            )

    def require_metric(self, metrics: Collection[str]) -> None:
        """Raise TrainingError if ``best`` is none of the metrics of the model."""
        name = self.best.partition(":")[0]
        if name and name not in ("loss", *metrics):
            raise TrainingError(
                f"the best checkpoint is asked for by {name}, but the held-out means of this model "
                f"are {', '.join(('loss', *metrics))}"
            )

    def score(self, metrics: Mapping[str, float]) -> float:
        """Return the mean that ``best`` names, signed so that more is better; -inf without one."""
        name, _, direction = self.best.partition(":")
        value = metrics.get(name, math.nan)
        if not math.isfinite(value):
            return -math.inf
        return value if direction == "max" else -value


def require_place(folder: Path | None, resumed: Path | None, *, is_series: bool) -> None:
    """Check that the folder for a checkpoint, if any, can be used.

    Args:
        resumed: checkpoint from which training goes on.
        is_series: the folder is for several checkpoints, perhaps beside the resumed one.

    Raises:
        TrainingError: if the folder exists.
    """
    if folder is None or not folder.exists() or (is_series and is_unused(folder)):
        return
    last = None if resumed is None or (folder / MANIFEST).exists() else newest(folder)
    known = () if last is None else (folder.resolve(), last.resolve())
    goes_on = resumed is not None and resumed.resolve() in known
    if goes_on and is_series:
        return
    why = "exists"
    if last is not None and is_series:
        why += f", and the checkpoint to resume from, {resumed}, is not the last one in it"
    way_on = "name a new folder" + (", or add to those in it with --save-every" if goes_on else "")
    if resumed is None and newest(folder) is not None:
        way_on += f", or go on from those in it with --resume {folder}"
    raise TrainingError(f"{folder} {why}; checkpoints are never written over, {way_on}")
