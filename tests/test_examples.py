"""The examples run as they stand, with fewer steps."""

import importlib.util
import re
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"

pytestmark = pytest.mark.dist


def example(name, monkeypatch, folder):
    """The example as a module, run in an empty folder."""
    monkeypatch.chdir(folder)
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "STEPS", 3)
    monkeypatch.setattr("sys.argv", [name])
    return module


def test_two_tower(tmp_path, monkeypatch, capfd):
    """Planned as it was measured, trained by that, and the plan is left for torchrun."""
    example("two_tower", monkeypatch, tmp_path).main()
    printed = capfd.readouterr().out
    assert re.search(r"\d stages?, depth \d, on \d devices?", printed)
    assert re.search(r"held-out accuracy 0\.\d+, by chance about 0\.1", printed)
    assert (tmp_path / "plan.json").exists()
