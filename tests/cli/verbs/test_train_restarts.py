"""Ranks that are started again: what they go on from, and where that ends."""

import json
import os
from pathlib import Path

import pytest

from anabranch.checkpoint import Checkpoint
from anabranch.checkpoint.series import checkpoints
from anabranch.cli.training import restarts
from anabranch.record import load_run

pytestmark = pytest.mark.dist

KILLED = ("train", "tests.cli.models:killed_once", "--batch-size", "8", "--max-replicas", "1")
SAVED = ("--save", "run", "--save-every", "3", "--steps", "10")


def test_training_goes_on_from_the_last_checkpoint(document, tmp_path):
    """A rank is killed in step 7: steps 6 to 9 are done again from the checkpoint after six, with
    the losses of a run that nobody disturbed.
    """
    found = document(*KILLED, *SAVED, "--max-restarts", "1")
    assert found["restarts"] == 1
    assert [step for step, _ in checkpoints(tmp_path / "run")] == [9, 10]
    whole = document(*KILLED, "--steps", "10")
    assert (whole["restarts"], len(whole["losses"])) == (0, 10)
    assert found["losses"] == pytest.approx(whole["losses"][6:], rel=1e-5)


def test_of_a_killed_rank_no_traceback_is_promised_and_the_steps_before_are_kept(run, tmp_path):
    """There is none, as no Python code has raised anything."""
    code, _, err = run(*KILLED, "--steps", "9", "--out", "kept", "--save", "s", "--save-every", "3")
    assert code == 1
    assert "StageFailedError: rank 1 was killed by signal 9" in err
    assert "with --resume s --steps 3 and another --out" in err
    assert "ANABRANCH_DEBUG" not in err
    kept = load_run(tmp_path / "kept")
    assert 5 <= len(kept.losses) <= 7
    assert kept.median_step_s > 0


def test_where_no_checkpoint_is_kept_training_begins_again(run, tmp_path):
    """Once; it is said why, and from where."""
    code, _, err = run(*KILLED, "--steps", "9", "--max-restarts", "1", "--json")
    assert code == 0
    assert "restart 1 of 1, from the beginning" in err
    assert "rank 1 was killed by signal 9" in err


def test_with_fewer_devices_training_is_planned_anew(document, monkeypatch, tmp_path):
    """Of two devices one is gone when the ranks are started again; the checkpoint loads all the
    same.
    """
    left = iter([2, 1])
    monkeypatch.setattr(restarts, "devices_left", lambda job: next(left))
    found = document(*KILLED, *SAVED, "--max-restarts", "1")
    assert (found["restarts"], len(found["losses"])) == (1, 4)
    assert len(found["device_peak_bytes"]) <= 1


def test_what_is_planned_anew_keeps_mode_and_policy_of_the_plan_file(run, document, monkeypatch):
    """Neither was named on the command line. A single stage is never stale under any policy, so
    ``auto`` would choose naive.
    """
    options = ("--cluster", "local:2", "--batch-size", "8", "--max-replicas", "1")
    plan = ("plan", KILLED[1], *options, "--mode", "async", "--policy", "stash", "-o", "p.json")
    assert run(*plan)[0] == 0
    left = iter([2, 1])
    monkeypatch.setattr(restarts, "devices_left", lambda job: next(left))
    found = document("train", KILLED[1], "--plan", "p.json", *SAVED, "--max-restarts", "1")
    assert (found["mode"], found["policy"]) == ("async", "stash")
    assert (found["restarts"], len(found["version_difference"])) == (1, 1)


def test_with_survive_a_failure_costs_a_few_steps(run, tmp_path):
    """It is said what died and where training goes on; the losses are those of all steps."""
    options = (*KILLED, "--steps", "10", "--seed", "3", "--json")
    code, out, err = run(*options, "--survive", "--spare-copies", "2")
    assert code == 0
    assert "rank 1 was killed by signal 9 (SIGKILL) reading data" in err
    assert "; goes on from step 6" in err
    whole = json.loads(run(*options)[1])
    survived = json.loads(out)
    assert survived["restarts"] == 0
    (recovery,) = survived["recoveries"]
    assert recovery.startswith("step 6: rank 1 was killed by signal 9 (SIGKILL)")
    assert survived["losses"] == whole["losses"]
    assert survived["metrics"] == whole["metrics"]


def test_with_survive_training_goes_on_with_a_device_fewer(document, tmp_path):
    """Nobody replaces the dead rank; the plan in the run's folder is the one for what is left."""
    options = (*KILLED, "--steps", "10", "--seed", "3")
    survived = document(*options, "--survive", "--no-replace", "--save", "run")
    assert survived["recoveries"][0].endswith("; planned anew for 1 device")
    plan = json.loads((tmp_path / survived["run"] / "plan.json").read_text())
    assert [stage["devices"] for stage in plan["stages"]] == [[0]] * len(plan["stages"])
    assert Checkpoint(tmp_path / "run").progress.step == 10
    (tmp_path / "killed").touch()
    whole = document(*options)
    assert survived["losses"] == pytest.approx(whole["losses"], rel=1e-4)


def test_under_torchrun_the_first_process_has_all_ranks(run, monkeypatch):
    """The others end at once; ranks of several hosts are refused."""
    for name, value in {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    options = (*KILLED, "--steps", "10", "--seed", "3", "--json", "--survive")
    assert run(*options)[:2] == (0, "")
    monkeypatch.setenv("RANK", "0")
    code, out, err = run(*options)
    assert code == 0
    assert len(json.loads(out)["losses"]) == 10
    assert "rank 1 was killed" in err
    assert "RANK" not in os.environ
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    code, _, err = run(*options)
    assert code == 2
    assert "the ranks are on several hosts" in json.loads(_)["message"]


def test_under_torchrun_restarts_are_torchruns(run, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    code, _, err = run(*KILLED, "--max-restarts", "1")
    assert (code, "give it to torchrun" in err) == (2, True)
    assert not Path("killed").exists()
