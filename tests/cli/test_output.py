"""What the verbs write beside their documents: warnings and the line of progress."""

from __future__ import annotations

import sys
import warnings

import pytest

from anabranch import cli
from anabranch.cli.output import TrainingProgress, Warnings
from anabranch.train import Progress


def test_a_warning_is_one_paragraph_and_told_once(capsys):
    """Without the place in our source, which says nothing to a user."""
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = Warnings()
        for _ in range(2):
            warnings.warn("no gradient\nreaches x", stacklevel=1)
        warnings.warn("another", stacklevel=1)
    assert capsys.readouterr().err == "warning: no gradient reaches x\nwarning: another\n"


def shown(capsys, seconds: list[float], *, is_async: bool) -> str:
    """The last line after steps of so many seconds, whose losses are their numbers."""
    progress = TrainingProgress(0.5, is_async=is_async)
    for step, taken in enumerate(seconds, 1):
        # The last one is short.
        samples = 3 if step == len(seconds) else 8
        progress(Progress(step, len(seconds), float(step), {}, taken, samples))
    return capsys.readouterr().err.strip()


def test_progress_without_a_flush_is_that_of_the_final_rows(capsys):
    """The mean of what took time, 2 s for mini-batches of 8 samples, and of the last ten losses."""
    line = shown(capsys, [0.0, 0.0, 1.0, 1.0, 4.0, *[0.0] * 7], is_async=True)
    assert line.startswith("mini-batch 12/12, ")
    assert line.endswith("loss 7.5000, 4 samples/s, mini-batch 2000.00 ms (predicted 500.00)")


def test_progress_before_any_time_is_known(capsys):
    """A run that never fills its pipeline has no time per mini-batch."""
    assert shown(capsys, [0.0, 0.0], is_async=True).endswith("loss 1.5000")


def test_progress_with_a_flush_has_steps(capsys):
    """Their median, which the first one does not disturb."""
    line = shown(capsys, [9.0, 1.0, 1.0], is_async=False)
    assert line.startswith("step 3/3, ")
    assert line.endswith("loss 2.0000, 8 samples/s, step 1000.00 ms (predicted 500.00)")


@pytest.mark.parametrize("text", ["a", "b"])
def test_every_call_of_the_command_line_tells_anew(capsys, text):
    """What one has told is not known to the next."""
    for _ in range(2):
        Warnings()(UserWarning(text), UserWarning, "file.py", 1)
    assert capsys.readouterr().err == f"warning: {text}\n" * 2


@pytest.mark.dist
@pytest.mark.filterwarnings("default")
def test_a_warning_of_a_rank_is_told_once_and_short(capfd, monkeypatch, tmp_path):
    """SGD without momentum has nothing to predict with; how Python shows it is restored."""
    monkeypatch.chdir(tmp_path)
    model = ["train", "tests.cli.models:without_momentum", "--devices", "2", "--max-replicas", "1"]
    how = ["--batch-size", "8", "--steps", "3", "--mode", "async", "--policy", "pipeoptim"]
    monkeypatch.setattr(sys, "argv", ["anabranch", *model, *how])
    before = warnings.showwarning
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert not stopped.value.code
    err = capfd.readouterr().err
    assert err.count("warning: pipeoptim predicts from the momentum") == 1
    assert "UserWarning" not in err
    assert warnings.showwarning is before
