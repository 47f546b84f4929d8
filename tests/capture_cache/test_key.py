"""When two commands ask for the same capture."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

from anabranch.capture_cache import key
from anabranch.capture_cache.key import builtin_key, is_installed, own_modules, own_sources
from tests.test_rooms import imports, modules


def test_every_part_of_a_builtin_counts() -> None:
    """Name, preset, options and granularity; the order of options does not."""
    options = {"a": "1", "b": "2"}
    base = builtin_key("mmt", "small", options, "layer")
    assert base == builtin_key("mmt", "small", dict(reversed(options.items())), "layer")
    others = {
        builtin_key("dlrm", "small", options, "layer"),
        builtin_key("mmt", "published", options, "layer"),
        builtin_key("mmt", "small", {"a": "1"}, "layer"),
        builtin_key("mmt", "small", options, "block"),
    }
    assert len(others - {base}) == 4


@pytest.mark.parametrize("name", ["graph/capture.py", "models/mmt.py", "workload.py"])
def test_our_own_code_counts(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkout changes without its version; any byte of what captures makes another key."""
    for path in key.CAPTURING:
        (tmp_path / path).parent.mkdir(exist_ok=True)
    for path in ("graph/capture.py", "models/mmt.py", *key.CAPTURING[:5]):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text("x = 1\n")
    monkeypatch.setattr(key, "_PACKAGE", tmp_path)
    before = builtin_key("mmt", "small", {}, "layer")
    (tmp_path / name).write_text("x = 2\n")
    assert builtin_key("mmt", "small", {}, "layer") != before


def test_all_code_that_captures_is_in_the_key() -> None:
    """Whatever building, capturing and tracing import of this package is hashed."""
    roots = ("anabranch.graph.capture", "anabranch.profile.estimate", "anabranch.models.names")
    reached = {"anabranch.models.mmt"}
    todo = [*roots, *(name for name in modules() if name.startswith("anabranch.models."))]
    while todo:
        name = todo.pop()
        if name not in reached:
            reached.add(name)
            todo += imports().get(name, ())
    rooms = {name.split(".")[1] for name in reached if "." in name}
    assert rooms <= {name.removesuffix(".py") for name in key.CAPTURING}


def test_the_users_code_is_told_from_what_is_installed(tmp_path: Path) -> None:
    """Python, torch and this package are keyed by version; a file of the user's by its content."""
    file = tmp_path / "mine.py"
    file.write_text("layers = 2\n")
    for module in ("json", "torch.nn", "anabranch.workload", "pytest"):
        assert is_installed(Path(str(import_module(module).__file__)))
    assert not is_installed(file)
    module = type(sys)("mine")
    module.__file__ = str(file)
    files = own_modules({"mine": module, "torch": torch, "sys": sys})
    assert files == {"mine": file}
    before = own_sources(files)
    assert own_sources(files) == before
    file.write_text("layers = 3\n")
    assert own_sources(files) != before
