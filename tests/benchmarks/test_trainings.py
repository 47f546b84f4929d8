"""The benchmark of trainings, small: tasks are trained, scored and told."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.trainings import curves
from benchmarks.trainings.__main__ import show, trained
from benchmarks.trainings.tasks import TASKS
from tests.benchmarks.datasets.fakes import fake_data


@pytest.mark.dist
@pytest.mark.parametrize("name", ["retrieval", "flights", "drugs"])
def test_a_training(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One step as a pipeline and in one process, which begin with the same loss."""
    fake_data(monkeypatch)
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
