"""What is left to do after a failure."""

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from anabranch.checkpoint import Progress, RankPart
from anabranch.checkpoint.saving import Saving
from anabranch.checkpoint.writing import Target
from anabranch.cli.training.restarts import left_of, restarted, surviving, train_with_restarts
from anabranch.cli.training.training_settings import TrainingSettings
from anabranch.errors import DataError, LoaderError, StageFailedError, TrainingError
from anabranch.runtime.state.spare_copies import Moment
from tests.record.test_folder import PLAN


def saved(folder: Path, step: int) -> Path:
    part = RankPart({"model/w": torch.zeros(1)})
    chosen = Target(folder / f"step-{step}", "0" * 16, 1, Progress(step=step))
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


@pytest.mark.parametrize(
    ("asked", "fault", "way_on"),
    [
        ({}, "", "there is no checkpoint to go on from; --save FOLDER .* --max-restarts 3 .*"),
        ({"survive": True}, "", ""),
        ({}, "Traceback of rank 1", ""),
    ],
)
def test_a_rank_that_dies_for_good_names_the_way_on(asked, fault: str, way_on: str):
    """Where nobody has asked for one; code that raises would raise again."""

    def fails(_: TrainingSettings) -> None:
        failure = StageFailedError("rank 1 was killed")
        if fault:
            failure.add_note(fault)
        raise failure

    with pytest.raises(StageFailedError) as raised:
        train_with_restarts(fails, TrainingSettings(steps=5, **asked), [].append)
    assert re.fullmatch("rank 1 was killed" + ("; " + way_on if way_on else ""), str(raised.value))


def test_an_error_of_the_data_names_the_checkpoint_of_its_run(training: TrainingSettings):
    """Where this run has made none, nothing is said of those before."""

    def fails(_: TrainingSettings) -> None:
        raise LoaderError("the disk is on fire")

    for step, way_on in ((40, ""), (60, "; .*step-60 is left: to go on, .* --steps 80")):
        saved(training.save, step)
        with pytest.raises(LoaderError) as raised:
            train_with_restarts(fails, training, [].append)
        assert re.fullmatch("the disk is on fire" + way_on, str(raised.value))


def test_survival_with_a_device_fewer_has_the_prediction_of_its_plan(monkeypatch):
    """With as many ranks the first one's; each recovery is on record."""
    job = SimpleNamespace(plan=PLAN)
    count, record = len(PLAN.stage_graph.devices), list[str]()
    survival = surviving(job, TrainingSettings(), count, lambda _: 0.75, 0.5, record.append)
    survival.copies.close()
    assert survival.begin(count, "rank 1 was killed", None) == (PLAN, 0.5)
    assert survival.begin(count - 1, "rank 0 was killed", Moment(6, 1, count)) == (PLAN, 0.75)
    fewer = f"planned anew for {count - 1} device{'s' * (count > 2)}"
    assert record == ["step 0: rank 1 was killed", f"step 6: rank 0 was killed; {fewer}"]


def test_only_ranks_that_fail_are_started_again(training: TrainingSettings):
    """Bad data is bad the second time as well; and there is an end to it."""
    said: list[str] = []
    attempts: list[int | None] = []

    def fails(asked: TrainingSettings) -> None:
        attempts.append(asked.steps)
        saved(training.save, 50 + len(attempts))
        raise StageFailedError("rank 1 was killed")

    with pytest.raises(StageFailedError, match=r"step-53 is left: .* --resume \S+/run --steps 87"):
        train_with_restarts(fails, replace(training, max_restarts=2), said.append)
    assert attempts == [100, 89, 88]
    assert [text.split("; ")[1].split(",")[0] for text in said] == [
        "restart 1 of 2",
        "restart 2 of 2",
    ]

    def is_bad(asked: TrainingSettings) -> None:
        attempts.append(0)
        raise DataError("no samples")

    with pytest.raises(DataError, match=r"samples; \S+/step-53 is left: .* --steps 87"):
        train_with_restarts(is_bad, replace(training, max_restarts=2), said.append)
    assert attempts[3:] == [0]
