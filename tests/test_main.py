"""The entry point of the command line."""

import sys

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
