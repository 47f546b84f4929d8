"""The command line: documents, exit codes, and one paragraph for every mistake."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from anabranch.cli import options
from anabranch.planner import PLANNERS
from anabranch.schedule import SCHEDULES

TOWERS = "tests.cli.models:towers"


@pytest.fixture
def run(call):
    """As it is printed, line by line."""
    return call


@pytest.fixture
def profile(run, tmp_path) -> str:
    """A profile file of the towers, estimated so that it is the same everywhere."""
    path = str(tmp_path / "profile.json")
    code, _, err = run(
        "profile", TOWERS, "--device", "v100", "--batch-size", "16", "-o", "width=64", "-o", path
    )
    assert code == 0, err
    return path


def test_choices_are_the_tables_of_the_families():
    """They are spelled out for a fast --help, so something must hold them together."""
    assert {each.value for each in options.Planner} == set(PLANNERS)
    assert {each.value for each in options.Schedule} == {"auto", "published", *SCHEDULES}


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


def test_a_profile_file_is_planned_without_torch(profile, tmp_path):
    """Torch takes seconds to load; a saved profile needs none of it."""
    code = (
        "import sys; from anabranch import cli\n"
        f"sys.argv = ['anabranch', 'plan', {profile!r}, '--cluster', 'summit:1x2',"
        " '--batch-size', '16', '--json']\n"
        "try:\n    cli.main()\nexcept SystemExit as end:\n    assert not end.code\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["schema"] == "anabranch.plan/1"


def test_plan_has_the_fields_of_the_contract(document, profile):
    """Other programs rely on them."""
    found = document("plan", profile, "--cluster", "summit:1x4", "--batch-size", "16")
    assert {"planner", "stages", "edges", "depth", "search_s", "predicted"} <= found.keys()
    assert {"operators", "devices", "microbatch_size", "k", "in_flight"} <= found["stages"][
        0
    ].keys()
    assert set(found["baselines"]) == {"sequential", "straight sequential"}
    assert found["gain"]["sequential"] >= 1 - 1e-9
    assert sorted(d for stage in found["stages"] for d in stage["devices"]) == [0, 1, 2, 3]


def test_compare_has_every_planner(document, profile):
    """Ours is never behind the strongest chain or data parallelism: it simulates theirs too."""
    found = document("compare", profile, "--cluster", "summit:1x2", "--batch-size", "16")
    assert [plan["planner"] for plan in found["plans"]] == [each.value for each in options.Planner]
    steps = {p["planner"]: p["predicted"]["step_s"] for p in found["plans"] if "predicted" in p}
    assert steps["graphpipe"] <= min(steps["sequential"], steps["data-parallel"]) * (1 + 1e-9)


def test_compare_shows_a_row_for_who_cannot(run, profile, tmp_path):
    """One sample cannot be shared out: no data parallelism, and the row and a line say so."""
    file = tmp_path / "compare.json"
    code, out, err = run(
        *("compare", profile, "--cluster", "summit:1x2", "--batch-size", "1", "-o", str(file)),
        *("--planner", "even", "--planner", "data-parallel"),
    )
    assert code == 0, err
    lines = {line.split()[0]: line for line in out.splitlines() if line.strip()}
    assert "no plan" in lines["data-parallel"]
    assert "at least 2 samples" in lines["data-parallel:"]
    even, parallel = json.loads(file.read_text())["plans"]
    assert even["predicted"]["step_s"] > 0
    assert set(parallel) == {"planner", "error", "kind"}


def test_planner_options_reach_the_planner(document, run, profile):
    """With a name and a value; a wrong one is wrong usage and lists what there is."""
    arguments = ("plan", profile, "--cluster", "summit:1x4", "--batch-size", "16")
    found = document(*arguments, "--planner", "sequential", "--planner-option", "max_replicas=1")
    assert all(len(stage["devices"]) == 1 for stage in found["stages"])
    code, _, err = run(*arguments, "--planner", "even", "--planner-option", "kfkb=true")
    assert code == 2
    assert "max_replicas" in err
    code, _, err = run(*arguments, "--planner-option", "kfkb")
    assert code == 2


def test_check_and_simulate_a_plan_file(run, document, profile, tmp_path):
    """The plan that was just written is valid and takes as long as it says; a broken one is not."""
    plan, page, trace = (str(tmp_path / name) for name in ("plan.json", "p.html", "t.json"))
    made = document("plan", profile, "--cluster", "summit:1x2", "--batch-size", "16", "-o", plan)
    assert document("check", plan, profile) == {"valid": True, "problems": []}
    found = document("simulate", plan, profile, "--report", page, "--trace", trace)
    assert found["step_s"] == pytest.approx(made["predicted"]["step_s"])
    assert len(found["device_peak_bytes"]) == 2
    assert "<svg" in Path(page).read_text(encoding="utf-8")
    assert json.loads(Path(trace).read_text())["traceEvents"]
    broken = json.loads(Path(plan).read_text())
    broken["stages"][0]["operators"].pop()
    if not broken["stages"][0]["operators"]:
        broken["stages"][0]["operators"] = ["nothing"]
    Path(plan).write_text(json.dumps(broken))
    code, out, _ = run("check", plan, profile, "--json")
    assert code == 1
    assert not json.loads(out)["valid"]


def test_a_plan_remembers_how_its_model_was_built(document, tmp_path):
    """So that ``simulate PLAN`` alone can build it again, options included."""
    plan = str(tmp_path / "plan.json")
    made = document(
        "plan", TOWERS, "--cluster", "summit:1x2", "--batch-size", "8", "-o", "width=32",
        "--granularity", "operator", "-o", plan,
    )  # fmt: skip
    assert made["options"] == {"preset": "published", "width": "32"}
    assert made["granularity"] == "operator"
    assert document("simulate", plan)["step_s"] == pytest.approx(made["predicted"]["step_s"])


@pytest.mark.dist
def test_verify_is_bitwise(document):
    """The proof that a newcomer asks for first."""
    found = document("verify", TOWERS, "--devices", "2", "--batch-size", "8")
    assert found["bitwise"]
    assert found["max_gradient_error"] == 0
    assert found["loss"] == found["reference_loss"]


@pytest.mark.dist
def test_train_save_resume_and_report(document, tmp_path):
    """The run folder holds page and picture; a checkpoint goes on under another plan."""
    out, saved = str(tmp_path / "out"), str(tmp_path / "saved")
    found = document(
        "train", TOWERS, "--devices", "2", "--steps", "12", "--batch-size", "8", "--out", out,
        "--save", saved, "--max-replicas", "1",
    )  # fmt: skip
    assert len(found["losses"]) == 12
    assert {"step_s", "predicted_step_s", "ideal_step_s", "metrics"} <= found.keys()
    assert found["metrics"].keys() == {"loss", "error"}
    assert Path(document("report", out)["path"]).exists()
    assert (tmp_path / "out" / "timeline.svg").exists()
    one_device = ("train", TOWERS, "--devices", "1", "--batch-size", "8")
    resumed = document(*one_device, "--steps", "2", "--resume", saved)["losses"]
    whole = document(*one_device, "--steps", "14")["losses"]
    assert [*found["losses"], *resumed] == pytest.approx(whole, rel=1e-4)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["plan", "mmt"], 2, "--cluster"),
        (["plan", "mtm", "--cluster", "local:2", "--batch-size", "4"], 2, "no built-in model mtm"),
        (["plan", "mmt", "--cluster", "nowhere:2", "--batch-size", "4"], 2, "summit:NODESxDEVICES"),
        (["plan", "no.json", "--cluster", "local:2", "--batch-size", "4"], 1, "does not exist"),
        (["profile", TOWERS, "--samples", "1,x"], 2, "whole numbers"),
        (["profile", TOWERS, "-o", "a.json", "-o", "b.json"], 2, "two output files"),
        (["profile", TOWERS, "-o", "depth=3"], 2, "depth"),
        (["check", "no.json"], 1, "does not exist"),
        (["report", "nowhere"], 1, "does not exist"),
        (["verify", "tests.cli.models:nothing"], 2, "nothing"),
    ],
)
def test_a_mistake_is_one_paragraph(run, arguments, code, message):
    """What, where, a way on; never a traceback."""
    found, _, err = run(*arguments)
    text = " ".join(err.replace("│", " ").split())
    assert found == code
    assert message in text
    assert "Traceback" not in err


def test_a_model_that_cannot_be_captured_names_its_line(run):
    """The user's own file and line, not ours."""
    code, out, err = run("verify", "tests.cli.models:branching", "--json")
    assert code == 1
    assert "models.py" in err
    assert "left.sum() > 0" in err or "line" in err
    assert json.loads(out)["error"] == "CaptureError"


@pytest.mark.dist
def test_data_that_raises_ends_every_rank(run):
    """The cause is named once, and no process is left."""
    code, _, err = run(
        "train", "tests.cli.models:with_failing_data", "--devices", "2", "--steps", "9",
        "--batch-size", "4", "--max-replicas", "1",
    )  # fmt: skip
    assert code == 1
    assert err.count("the disk is on fire") == 1
