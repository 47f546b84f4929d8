"""Tables and warnings: one line where one line is meant. What a command is to write is refused
before it does anything.
"""

import sys
import warnings
from contextlib import suppress
from pathlib import Path

import pytest

from anabranch import cli
from anabranch.cli.output import (
    Warnings,
    file_to_write,
    folder_to_write,
    print_rows,
    print_table,
    remark,
    remarks_at_end,
    say,
    say_remarks,
)
from anabranch.errors import OutputError


def test_a_title_stays_on_its_line(capsys):
    """It is cut, not wrapped into the table."""
    print_table("a long title " * 50, ["name", "s"], [["x", "1"]])
    title, _, row = capsys.readouterr().out.splitlines()
    assert title.endswith("…")
    assert row.split() == ["x", "1"]


@pytest.mark.parametrize("width", [50, 80])
def test_a_table_that_does_not_fit_is_a_list(capsys, monkeypatch, width):
    """No line is longer than the terminal, and no figure is cut off."""
    monkeypatch.setenv("COLUMNS", str(width))
    columns = ["planner", *(f"figure\n{i}" for i in range(12))]
    print_table("all", columns, [["a long name of a planner", *map(str, range(1000, 1012))]])
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= width
    assert out.splitlines()[1] == "a long name of a planner"
    assert [line.split() for line in out.splitlines()[2:]] == [
        ["figure", str(i), str(1000 + i)] for i in range(12)
    ]


def test_rows_wrap_beside_their_names(capsys, monkeypatch):
    """So that the names can be found."""
    monkeypatch.setenv("COLUMNS", "40")
    print_rows([("step", "12 ms, predicted 11 ms, which is near it"), ("loss", "1")])
    assert capsys.readouterr().out.splitlines() == [
        "  step          12 ms, predicted 11 ms,",
        "                which is near it",
        "  loss          1",
    ]


def test_a_warning_is_one_paragraph_and_told_once(capsys):
    """Without the place in our source, which says nothing to a user; the next call of the command
    line tells anew.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = Warnings()
        for _ in range(2):
            warnings.warn("no gradient\nreaches x", stacklevel=1)
        warnings.warn("another", stacklevel=1)
        warnings.warn("Sparse invariant checks are implicitly disabled. Memory", stacklevel=1)
    assert capsys.readouterr().err == "warning: no gradient reaches x\nwarning: another\n"
    Warnings()(UserWarning("another"), UserWarning, "file.py", 1)
    assert capsys.readouterr().err == "warning: another\n"


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
    assert err.count("warning: policy pipeoptim: it predicts from the momentum") == 1
    assert "UserWarning" not in err
    assert warnings.showwarning is before


@pytest.mark.parametrize(
    "arguments",
    [
        ("plan", "mmt", "--cluster", "local:2", "--batch-size", "4", "-o"),
        ("compare", "mmt", "--cluster", "local:2", "--batch-size", "4", "-o"),
        ("profile", "mmt", "-o"),
        ("cluster", "local:2", "-o"),
        ("simulate", "plan.json", "--report"),
        ("simulate", "plan.json", "--trace"),
        ("report", "run", "-o"),
        ("export", "checkpoint", "-o"),
        ("train", "two-branch", "--save"),
        ("train", "two-branch", "--out"),
        ("demo", "--out"),
    ],
)
def test_an_output_below_a_file_is_refused_at_once(call, tmp_path, arguments):
    """Models, plans, runs and checkpoints are not even looked for: most do not exist."""
    (tmp_path / "taken").write_text("")
    code, out, err = call(*arguments, "taken/below")
    assert (code, out) == (1, "")
    assert err.startswith("OutputError: ")
    assert "taken" in err
    assert "name another f" in err


def test_a_file_needs_a_folder(tmp_path):
    """That exists; a file may be written over, a folder may not."""
    assert file_to_write(None) is None
    assert file_to_write(tmp_path / "new") == tmp_path / "new"
    (tmp_path / "old").write_text("")
    assert file_to_write(tmp_path / "old") == tmp_path / "old"
    with pytest.raises(OutputError, match="is a folder; name a file in it"):
        file_to_write(tmp_path)
    with pytest.raises(OutputError, match=r"there is no folder .*none; make it first"):
        file_to_write(tmp_path / "none" / "new")


def test_a_folder_may_be_made_with_those_above_it(tmp_path):
    """Unless one of them is a file, or takes no files."""
    assert folder_to_write(tmp_path / "a" / "b") == tmp_path / "a" / "b"
    assert not (tmp_path / "a").exists()
    (tmp_path / "old").write_text("")
    with pytest.raises(
        OutputError, match=r"old is a file, which is not written over; give another"
    ):
        folder_to_write(tmp_path / "old")
    with pytest.raises(OutputError, match=r"cannot be written: /proc takes no files"):
        folder_to_write(Path("/proc/none"))


def test_remarks_on_a_prediction_stand_behind_the_result_once(capfd):
    """In one line; what was said in the middle of a command is not said again at its end, and a
    command that fails says nothing but why.
    """
    with remarks_at_end():
        remark("rough")
        remark("busy")
        remark("rough")
        say("the result")
        say_remarks()
        remark("busy")
        remark("old")
    assert capfd.readouterr() == ("the result\n", "rough; busy\nold\n")
    with suppress(ValueError), remarks_at_end():
        remark("rough")
        raise ValueError
    with remarks_at_end():
        pass
    assert capfd.readouterr() == ("", "")
