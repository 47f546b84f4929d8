"""What a command is to write is refused before it does anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from anabranch.cli.writable import file_to_write, folder_to_write
from anabranch.errors import OutputError


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
    with pytest.raises(OutputError, match=r"cannot be written: /proc takes no files"):
        folder_to_write(Path("/proc/none"))
