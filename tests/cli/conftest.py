"""The command line as a user calls it, in this process."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from anabranch import cli


@pytest.fixture
def call(monkeypatch, capsys, tmp_path):
    """Call ``anabranch`` in a folder of its own: (exit code, standard output, standard error)."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["anabranch", *arguments])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        out, err = capsys.readouterr()
        return int(stopped.value.code or 0), out, err

    return call


@pytest.fixture
def run(call):
    """Call it, and have standard error as one line without frames."""

    def folded(*arguments: str) -> tuple[int, str, str]:
        code, out, err = call(*arguments)
        return code, out, " ".join(err.replace("│", " ").split())

    return folded


@pytest.fixture
def document(run):
    """Call it with ``--json`` and read what it prints, which must be all of standard output."""

    def read(*arguments: str) -> dict[str, Any]:
        code, out, err = run(*arguments, "--json")
        assert code == 0, err
        return json.loads(out)

    return read
