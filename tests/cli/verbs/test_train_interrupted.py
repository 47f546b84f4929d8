"""Ctrl-C in ``train``: what was learned is kept, and a second one is obeyed at once."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from anabranch.checkpoint import MANIFEST
from anabranch.cli.training.run_results import say_stopped
from anabranch.record import load_run

pytestmark = pytest.mark.dist

PIPELINE = ("--devices", "2", "--batch-size", "8", "--max-replicas", "1")
MODES = [(), ("--mode", "async", "--policy", "stash")]


@pytest.fixture(autouse=True)
def _ctrl_c() -> Iterator[None]:
    """Python handles it, also where the tests run in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def run(run):
    """Nothing but an exit code ends it."""

    def guarded(*arguments: str) -> tuple[int, str, str]:
        try:
            return run(*arguments)
        except KeyboardInterrupt:
            pytest.fail("nobody was there for Ctrl-C")

    return guarded


@pytest.mark.parametrize("mode", MODES)
def test_the_first_ctrl_c_keeps_what_was_learned(run, mode, tmp_path):
    """A checkpoint, figures and a report as far as it came, and how to go on, which works."""
    train = (*PIPELINE, *mode, "--save", "kept", "--out", "first")
    code, out, err = run("train", "tests.cli.models:interrupting", *train, "--steps", "60")
    assert code == 130, err
    assert err.count("stopping after the step under way; Ctrl-C again stops at once") == 1
    found = load_run(tmp_path / "first")
    done = len(found.losses)
    assert found.interrupted
    assert 8 <= done < 20
    assert f"interrupted after {done} of 60 steps, with a loss of {found.losses[-1]:.4f}" in err
    assert (
        f"the same command with --resume kept --steps {60 - done} and another --save and --out"
        in err
    )
    assert "held-out" not in out
    assert (tmp_path / "first" / "report.html").exists()
    # The same model with the same data, but nobody who interrupts.
    again = (*PIPELINE, *mode, "--resume", "kept", "--steps", "3", "--json")
    code, out, err = run("train", "tests.cli.models:towers", *again)
    assert code == 0, err
    assert not json.loads(out)["interrupted"]
    assert json.loads(out)["metrics"].keys() == {"loss", "error"}


def test_without_save_there_is_no_checkpoint_and_it_is_said(run, tmp_path):
    """The document says that the run was interrupted."""
    train = ("train", "tests.cli.models:interrupting", *PIPELINE, "--epochs", "5", "--json")
    code, out, err = run(*train)
    assert code == 130
    assert json.loads(out)["interrupted"] is True
    assert "there is no checkpoint, which --save FOLDER would have written" in err
    assert Path(json.loads(out)["report"]).exists()


def test_the_second_ctrl_c_is_obeyed_at_once(run, tmp_path):
    """Also where a batch never comes."""
    train = ("train", "tests.cli.models:stuck", *PIPELINE, "--save", "kept")
    code, _, err = run(*train)
    assert code == 130
    assert "stopped at once; there is no checkpoint" in err
    assert not (tmp_path / "kept").exists()


def test_a_checkpoint_that_was_begun_is_none(tmp_path, capsys):
    """Of several none may be complete; one alone is its own folder."""
    (tmp_path / ".step-1.0a.partial").mkdir()
    say_stopped(tmp_path)
    (tmp_path / "step-2").mkdir()
    (tmp_path / "step-2" / MANIFEST).touch()
    say_stopped(tmp_path)
    say_stopped(tmp_path / "step-2")
    one = f"stopped at once; the checkpoint is {tmp_path / 'step-2'}"
    said = capsys.readouterr().err.splitlines()
    assert said == ["stopped at once; there is no checkpoint", one, one]
