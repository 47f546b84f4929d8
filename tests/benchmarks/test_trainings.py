"""The benchmark of trainings, small: tasks are trained, scored and told."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

import anabranch
from benchmarks.trainings import curves, tasks
from benchmarks.trainings.__main__ import show, trained
from benchmarks.trainings.tasks import TASKS
from tests.benchmarks.datasets.fakes import fake_data


@pytest.mark.dist
@pytest.mark.parametrize("name", ["retrieval", "flights", "drugs"])
def test_a_training(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One step as a pipeline and in one process, which begin with the same loss."""
    fake_data(monkeypatch)
    narrow = {"hidden": 8, "heads": 1, "feedforward": 8, "buckets": 64}
    monkeypatch.setitem(tasks.PRESETS, "small", replace(tasks.PRESETS["small"], **narrow))
    monkeypatch.setattr(anabranch, "measure", partial(anabranch.measure, repeats=1))
    monkeypatch.chdir(tmp_path)
    task = replace(TASKS[name], batch_size=8, microbatch_size=4, steps=1, every=1)
    row = trained(task)
    loops = row["curves"]
    assert [len(curve["scores"]) for curve in loops.values()] == [1] * (2 + task.couples)
    first, alone = loops["pipeline"]["losses"], loops["one process"]["losses"]
    assert first[0] == pytest.approx(alone[0], rel=1e-5)
    assert f"{name}: held-out {task.metric}" in show(name, row)
    curves.draw({name: row}, tmp_path / "curves.svg")
    assert (tmp_path / "curves.svg").stat().st_size > 0
