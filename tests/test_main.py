"""The entry point of the command line."""

import atexit
import gc
import sys
from typing import Any

import pytest

from anabranch.__main__ import main


def test_ctrl_c_while_the_command_line_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The exit code of any other interrupt, and no traceback: nothing has begun yet."""

    class Interrupting:
        def find_spec(self, name: str, *_: object) -> None:
            raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "anabranch.cli", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Interrupting()])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 130


def test_a_command_that_is_done_looks_for_no_garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left then goes with the process."""
    at_exit: list[Any] = []
    monkeypatch.setattr(atexit, "register", at_exit.append)
    monkeypatch.setattr(sys, "argv", ["anabranch", "models"])
    with pytest.raises(SystemExit):
        main()
    assert gc.freeze in at_exit
