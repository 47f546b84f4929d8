"""The verb ``cluster``: what it shows, and what becomes of a calibration."""

import json

import pytest

from anabranch.calibration import measure
from tests.calibration import examples


@pytest.fixture
def calibrated(monkeypatch, tmp_path):
    """A machine that is calibrated in no time, and a cache of its own."""
    monkeypatch.setenv("ANABRANCH_CACHE", str(tmp_path / "cache"))

    monkeypatch.setattr(measure, "calibrate", lambda: examples.cluster(2))


def test_a_preset_is_shown(run, document):
    """Its devices and links, for people and as the document of a cluster file."""
    code, out, _ = run("cluster", "summit:2x4")
    assert code == 0
    assert "summit:2x4: 8 devices (v100) with 16.0 GiB each" in out
    shown = document("cluster", "summit:2x4")
    assert [level["size"] for level in shown["levels"]] == [4, 2]
    assert shown["message_s"] is None
    assert shown["slowdown"] == []


def test_what_is_calibrated_is_kept_for_local_ranks(run, document, calibrated):
    """``local:4`` has it afterwards and says so; --no-calibration does without."""
    before = document("cluster", "local:4")
    assert before["calibration"] is None
    found = document("cluster", "--calibrate", "-o", "mine.json")
    assert found["slowdown"] == [1.0, 1.5, 2.25]
    assert found["message_s"] == 2.0
    with open("mine.json") as file:
        assert json.load(file)["calibration"] == found["calibration"]
    code, out, err = run("cluster", "local:4")
    assert code == 0
    assert "local:4 as calibrated on 2026-01-31" in err
    assert "1: 1.00x, 2: 1.50x, 3: 2.25x" in out
    assert document("cluster", "local:4")["calibration"] == found["calibration"]
    assert document("cluster", "local:4", "--no-calibration")["calibration"] is None


def test_a_plan_has_the_calibration_that_it_was_made_with(document, calibrated, profile):
    """So that whoever reads its prediction knows what it rests on."""
    document("cluster", "--calibrate")
    where = ("--cluster", "local:2", "--batch-size", "8")
    arguments = ("plan", profile, *where, "--planner", "even", "--no-baselines")
    assert document(*arguments)["machines"]["calibration"]["date"] == "2026-01-31"
    assert document(*arguments, "--no-calibration")["machines"]["calibration"] is None


def test_a_calibration_has_no_other_cluster(run):
    """It measures the machine at hand."""
    code, _, err = run("cluster", "summit:2x4", "--calibrate")
    assert code == 2
    assert "--calibrate measures this machine" in err
