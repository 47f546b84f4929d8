"""The benchmark of memory: predicted peaks, and the table of shared optimizer state."""

from dataclasses import replace
from typing import Any

import pytest

import anabranch
from anabranch.profile.profile import Profile
from benchmarks.memory import __main__ as peaks
from benchmarks.memory import sharded
from benchmarks.memory.sharded import compared, show
from tests.benchmarks.small import small_two_branch
from tests.calibration.examples import cluster

measure = anabranch.measure


def measured_with_seconds_of_bytes(*arguments: Any, **options: Any) -> Profile:
    """Return a profile with measured memory, in which each kept byte takes a nanosecond."""
    profile = measure(*arguments, **options)
    costs = []
    for cost in profile.costs:
        seconds = tuple(cost.kept_bytes * n * 1e-9 for n in profile.samples)
        costs.append(replace(cost, forward_s=seconds, backward_s=seconds, weight_s=()))
    return replace(profile, costs=tuple(costs))


@pytest.mark.dist
def test_peaks_are_measured_and_shown(monkeypatch, capsys):
    """One model on two ranks, as pipeline and as data parallelism; all are near predictions.

    Operators take seconds by the bytes they keep, so that a busy machine does not move the stages:
    of a stage with the small head alone, the messages on their way count a third in a prediction.
    """
    monkeypatch.setattr(peaks, "build", small_two_branch)
    monkeypatch.setattr(anabranch, "measure", measured_with_seconds_of_bytes)
    monkeypatch.setattr("sys.argv", ["memory", "--models", "two-branch", "--ranks", "2"])
    peaks.main()
    shown = capsys.readouterr().out
    assert all(f"| two-branch | 2 | {way} |" in shown for way in peaks.WAYS)
    assert "predicted / measured: lowest" in shown


@pytest.mark.dist
def test_shared_state_is_measured_and_shown(monkeypatch):
    """Two ranks have half of the optimizer's state each."""
    for name, value in (("TURNS", 2), ("SETTLING", 0), ("STEPS", 1), ("BATCH", 4)):
        monkeypatch.setattr(sharded, name, value)
    monkeypatch.setattr(sharded, "build", small_two_branch)
    (row,) = sharded.rows("two-branch", [2], cluster(2))
    whole, shared = row["state_bytes"]
    assert sum(shared) == whole[0] == whole[1]
    assert "| two-branch | 2 |" in show([row])


def test_state_and_steps_are_told_without_and_with_sharing():
    """Of 8 bytes two ranks keep 6 and 2; a step takes half as long, one in a row a quarter more."""
    row = {
        "model": "small",
        "ranks": 2,
        "taken": True,
        "state_bytes": [[8, 8], [6, 2]],
        "predicted_s": [0.004, 0.003],
        "step": {"seconds": [0.004, 0.002], "ratio": 0.5, "error": 0.01},
        "row": {"seconds": [0.004, 0.005], "ratio": 1.25, "error": 0.0},
    }
    told = show([row]).splitlines()[-1]
    assert [cell.strip() for cell in told.strip("|").split("|")] == [
        "small",
        "2",
        "0.750, 0.250",
        "yes",
        "4.0, 3.0 (0.750)",
        "4.0, 2.0 (0.500 +- 0.010)",
        "4.0, 5.0 (1.250 +- 0.000)",
    ]


def test_turns_are_compared_one_by_one():
    """Copies without sharing take 4 s, those with it 3, on the slower of two ranks; twice as long
    in one turn of five, in one more with sharing only: medians stay, and so does the ratio.
    """
    whole, shared = [4.0, 4.0, 8.0, 4.0, 4.0], [3.0, 3.0, 6.0, 6.0, 3.0]
    copies = [[[0.0] * 5, way] for way in (whole, shared, shared, whole)]
    found = compared(copies)
    assert found["seconds"] == [4.0, 3.0]
    assert found["ratio"] == 0.75
    assert found["error"] == pytest.approx(0.93 * (1.125 - 0.75) / 5**0.5)
