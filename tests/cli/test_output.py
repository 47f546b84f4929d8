"""Tables and warnings: one line where one line is meant."""

from __future__ import annotations

import sys
import warnings

import pytest

from anabranch import cli
from anabranch.cli.output import Warnings, print_table


def test_a_title_stays_on_its_line(capsys):
    """It is cut, not wrapped into the table."""
    print_table("a long title " * 50, ["name", "s"], [["x", "1"]])
    title, _, row = capsys.readouterr().out.splitlines()
    assert title.endswith("…")
    assert row.split() == ["x", "1"]


def test_a_warning_is_one_paragraph_and_told_once(capsys):
    """Without the place in our source, which says nothing to a user."""
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = Warnings()
        for _ in range(2):
            warnings.warn("no gradient\nreaches x", stacklevel=1)
        warnings.warn("another", stacklevel=1)
    assert capsys.readouterr().err == "warning: no gradient reaches x\nwarning: another\n"


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
