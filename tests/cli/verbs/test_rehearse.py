"""``rehearse``: plan files of models and of profiles, on emulated devices."""

import re
from pathlib import Path

import pytest

TOWERS = "tests.cli.models:towers"


@pytest.mark.dist
def test_a_plan_of_a_model_runs_without_its_weights(document, tmp_path):
    """The model is built as the plan says, for its sizes alone; other links change the prediction,
    and the folder has what ``report`` needs.
    """
    plan = str(tmp_path / "plan.json")
    made = document(
        "plan", TOWERS, "--cluster", "summit:1x2", "--batch-size", "8", "-o", "width=32",
        "--max-replicas", "1", "--planner", "even", "--no-baselines", "-o", plan,
    )  # fmt: skip
    options = (TOWERS, "--plan", plan, "--steps", "2", "--out")
    found = document("train", "--emulate", *options, "run")
    assert found["emulated"] is True
    assert found["losses"] == []
    assert found["ranks"] == 2
    assert found["predicted_step_s"] == pytest.approx(made["predicted"]["step_s"])
    assert found["step_s"] >= found["ideal_step_s"] * (1 - 1e-9)
    assert {"late_s", "time_scale", "message_bytes", "samples_per_s"} <= found.keys()
    assert Path(document("report", "run")["path"]).exists()
    slow = document("rehearse", *options, "slow", "--latency", "5000", "--bandwidth", "0.001")
    assert slow["predicted_step_s"] > found["predicted_step_s"] + 0.005
    assert slow["step_s"] > found["predicted_step_s"] + 0.005


@pytest.mark.dist
def test_a_profile_file_is_enough(run, tmp_path, document):
    """Planned for a cluster on the way, told in lines for people."""
    path = str(tmp_path / "profile.json")
    document("profile", TOWERS, "--device", "v100", "--batch-size", "8", "-o", path)
    code, out, err = run(
        "rehearse", path, "--cluster", "summit:1x2", "--batch-size", "8", "--steps", "1",
        "--latency", "5000",
    )  # fmt: skip
    assert code == 0, err
    # What is told of the plan is for the links that are emulated, so there is one prediction.
    (header,) = re.findall(r"^step ([\d.]+) ms", out, re.M)
    (row,) = re.findall(r"^  step +[\d.]+ ms, predicted ([\d.]+) ms", out, re.M)
    assert header == row
    assert "time scale" in out
    assert "profile's stage" in out  # by which the ideal step is; nothing was measured


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "--emulate"], "--emulate needs a plan (--plan FILE)"),
        (["train", "--emulate", "--epochs", "3"], "--epochs: not with --emulate"),
        (["rehearse"], "there is no plan to rehearse; give --plan FILE or --cluster"),
        (["rehearse", "--plan", "p.json", "--batch-size", "3"], "p.json decides"),
    ],
)
def test_options_that_do_not_go_together(run, arguments, message):
    """Wrong usage, said before anything is built."""
    code, _, err = run(arguments[0], TOWERS, *arguments[1:])
    assert code == 2
    assert message in err
