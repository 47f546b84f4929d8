"""What is left to do after a failure."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from anabranch.checkpoint import Progress, RankPart
from anabranch.checkpoint.saving import Saving
from anabranch.checkpoint.writing import Target
from anabranch.cli.restarts import left_of, restarted, train_with_restarts
from anabranch.cli.training_settings import TrainingSettings
from anabranch.errors import DataError, StageFailedError, TrainingError


def saved(folder: Path, step: int) -> Path:
    part = RankPart({"model/w": torch.zeros(1)})
    chosen = Target(folder / f"step-{step}", "0" * 16, 1, Progress(step))
    saving = Saving(chosen, 0, part, keep=None, timeout=5.0)
    saving.confirm()
    saving.wait()
    return chosen.folder


@pytest.fixture
def training(tmp_path: Path) -> TrainingSettings:
    """A hundred steps that go on from a checkpoint after 40, with a checkpoint every ten."""
    return TrainingSettings(
        steps=100, resume=saved(tmp_path / "before", 40), save=tmp_path / "run", save_every="10"
    )


def test_steps_are_counted_from_where_the_first_attempt_began(training: TrainingSettings):
    """40 before, 30 since then; so 70 of the hundred are left."""
    assert left_of(training, 40) == training
    last = saved(training.save, 70)
    assert left_of(training, 40) == replace(training, resume=last, steps=70)
    assert restarted(training) == left_of(training, 40)


def test_epochs_are_counted_by_the_checkpoint(training: TrainingSettings):
    last = saved(training.save, 70)
    by_epochs = replace(training, steps=None, epochs=3, resume=None, weights=Path("w"))
    assert left_of(by_epochs, 0) == replace(by_epochs, resume=last, weights=None)


def test_nothing_is_done_twice(training: TrainingSettings):
    """What failed came behind the last step."""
    saved(training.save, 140)
    with pytest.raises(TrainingError, match="step-140 has all 100 steps"):
        left_of(training, 40)


def test_under_torchrun_the_beginning_has_to_be_known(training: TrainingSettings):
    """The folder's newest checkpoint is another one at every start."""
    with pytest.raises(TrainingError, match="how many of --steps were done before cannot be told"):
        restarted(replace(training, resume=training.save))


def test_only_ranks_that_fail_are_started_again(training: TrainingSettings):
    """Bad data is bad the second time as well; and there is an end to it."""
    said: list[str] = []
    attempts: list[int | None] = []

    def fails(asked: TrainingSettings) -> None:
        attempts.append(asked.steps)
        saved(training.save, 50 + len(attempts))
        raise StageFailedError("rank 1 was killed")

    with pytest.raises(StageFailedError):
        train_with_restarts(fails, replace(training, max_restarts=2), said.append)
    assert attempts == [100, 89, 88]
    assert [text.split("; ")[1].split(",")[0] for text in said] == [
        "restart 1 of 2",
        "restart 2 of 2",
    ]

    def is_bad(asked: TrainingSettings) -> None:
        attempts.append(0)
        raise DataError("no samples")

    with pytest.raises(DataError):
        train_with_restarts(is_bad, replace(training, max_restarts=2), said.append)
    assert attempts[3:] == [0]
