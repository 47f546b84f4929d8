"""The verb train without a flush."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from anabranch import cli

TOWERS = "tests.cli.models:towers"


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """Call ``anabranch`` in a folder of its own: (exit code, standard output, standard error)."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["anabranch", *arguments])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        out, err = capsys.readouterr()
        return int(stopped.value.code or 0), out, " ".join(err.replace("│", " ").split())

    return call


@pytest.fixture
def document(run):
    """Call with ``--json`` and read what it prints."""

    def call(*arguments: str) -> dict[str, Any]:
        code, out, err = run(*arguments, "--json")
        assert code == 0, err
        return json.loads(out)

    return call


PIPELINE = ("train", TOWERS, "--devices", "2", "--batch-size", "8", "--max-replicas", "1")


@pytest.mark.dist
@pytest.mark.parametrize("policy", ["auto", "stash", "2bw"])
def test_a_run_says_how_stale_its_stages_were(run, document, policy, tmp_path):
    """Figures, and a plan in its folder that trains the same way again."""
    found = document(*PIPELINE, "--steps", "12", "--mode", "async", "--policy", policy)
    folder = tmp_path / found["run"]
    plan = json.loads((folder / "plan.json").read_text())
    assert (plan["mode"], plan["policy"]) == ("async", found["policy"])
    assert found["mode"] == "async"
    assert found["policy"] == {"auto": "pipeoptim"}.get(policy, policy)
    assert len(found["losses"]) == 12
    assert found["period_s"] > 0
    stages = len(plan["stages"])
    assert len(found["version_difference"]) == stages
    assert found["version_difference"][-1] == 0
    assert len(found["peak_versions"]) == 2
    assert max(found["peak_versions"]) <= 2
    assert found["metrics"].keys() == {"loss", "error"}
    assert Path(document("report", str(folder))["path"]).exists()
    emulated = ("train", TOWERS, "--plan", str(folder / "plan.json"), "--emulate")
    code, _, err = run(*emulated)
    assert code == 2
    assert "is for mode async" in err
    again = document("train", TOWERS, "--plan", str(folder / "plan.json"), "--steps", "12")
    assert again["policy"] == found["policy"]
    assert again["losses"] == found["losses"]


@pytest.mark.dist
def test_what_was_learned_goes_on_with_a_flush_and_without(document, tmp_path):
    """Checkpoints are of no mode."""
    saved, again = str(tmp_path / "a"), str(tmp_path / "b")
    document(*PIPELINE, "--steps", "4", "--save", saved)
    without = (*PIPELINE, "--mode", "async", "--policy", "stash")
    first = document(*without, "--steps", "4", "--resume", saved, "--save", again)
    assert len(first["losses"]) == 4
    second = document(*PIPELINE, "--steps", "2", "--resume", again)
    assert len(second["losses"]) == 2
    assert "policy" not in second


@pytest.mark.dist
def test_the_summary_for_people(run):
    """Policy, version differences, copies of the weights."""
    code, out, err = run(*PIPELINE, "--steps", "5", "--mode", "async", "--policy", "stash")
    assert code == 0, err
    rows = {line[2:22].strip(): line[22:].strip() for line in out.splitlines()}
    assert rows["policy"] == "stash"
    assert rows["version difference"].endswith("updates, by stage")
    assert "by device" in rows["versions of weights"]


@pytest.mark.dist
def test_data_that_raises_ends_every_rank(run):
    """In the middle of the stream, with others in flight."""
    failing = ("train", "tests.cli.models:with_failing_data", *PIPELINE[2:])
    code, _, err = run(*failing, "--steps", "9", "--mode", "async")
    assert code == 1
    assert err.count("the disk is on fire") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policy", "stash"], "--policy and its options are for --mode async"),
        (["--mode", "async", "--accumulate", "2"], "take a larger --batch-size"),
        (["--mode", "async", "--policy", "none"], "is not one of"),
        (["--mode", "async", "--policy", "stash", "--policy-option", "clip=3"], "it has none"),
        (["--mode", "async", "--schedule", "gpipe"], "schedule gpipe is for mode sync"),
        (["--mode", "async", "--emulate"], "not with --emulate"),
    ],
)
def test_options_that_do_not_go_together(run, arguments, message):
    """Wrong usage, in one paragraph."""
    code, _, err = run("train", TOWERS, "--devices", "2", *arguments)
    assert code == 2
    assert message in err


def test_half_precision_that_needs_a_scale_is_refused(run):
    """By the pipeline, with the alternative."""
    code, _, err = run(*PIPELINE, "--mode", "async", "--precision", "fp16")
    assert code == 1
    assert "bf16" in err
