"""The verb profile: measured, estimated, and files of other projects in our format."""

import json
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

from anabranch.cli.training.job import Job
from anabranch.files import load_plan, load_profile
from tests.cli.examples import TOWERS


def test_profile_measures_and_writes(document, tmp_path):
    """The contract's fields, and a file that planning can start from."""
    path = tmp_path / "p.json"
    found = document("profile", TOWERS, "--samples", "1,2,4", "-o", str(path))
    assert found["source"] == "measured"
    assert found["samples"] == [1, 2, 4]
    assert found["parameter_bytes"] == 4 * (2 * (8 * 16 + 16 + 16 * 16 + 16) + 32 + 1)
    assert found["operators"] >= 5
    assert found["forward_s"] > 0
    assert found["backward_s"] > 0
    assert json.loads(path.read_text())["schema"] == "anabranch.profile/1"


def test_a_plan_has_the_precision_of_its_profile(run, document, tmp_path):
    """A kept capture is of one precision."""
    paths = {name: str(tmp_path / f"{name}.json") for name in ("half", "full", "plan")}
    estimated = "profile", TOWERS, "--samples", "1,8", "--device", "h100"
    for _ in range(2):
        full = document(*estimated, "-o", paths["full"])
        half = document(*estimated, "-o", paths["half"], "--precision", "bf16")
    assert half["kept_capture"]
    assert half["forward_s"] != full["forward_s"]
    values = [
        sum(value["nbytes"] for value in json.loads(Path(paths[name]).read_text())["values"])
        for name in ("half", "full")
    ]
    assert values[0] < values[1]
    search = "--cluster", "local:2", "--batch-size", "8", "--no-baselines"
    plan = document("plan", paths["half"], *search, "-o", paths["plan"])
    assert plan["precision"] == "bf16"
    assert plan["profile"].endswith(", in bf16")
    assert "precision" not in document("plan", paths["full"], *search)
    code, _, error = run("simulate", paths["plan"], paths["full"], "--precision", "fp32")
    assert (code, "itself says" in error) == (0, False)  # of another precision
    job = Job(Mock(), replace(load_plan(paths["plan"]), device="cpu"))
    job.profile = load_profile(paths["full"])
    changed = job.predicted(replace(job.plan, precision="fp32"))
    assert changed.other_model(job.profile.graph) == ""
    for verb in (("simulate", paths["plan"]), ("plan", paths["full"], *search)):
        code, _, error = run(*verb, "--precision", "fp16")
        assert code == 2
        assert "is a profile in" in error
