"""Files of kept captures."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from anabranch.capture_cache import store
from anabranch.errors import FileFormatError
from tests.files.test_captures import traced


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of captures for this test."""
    monkeypatch.setenv("ANABRANCH_CACHE", str(tmp_path))
    return tmp_path / "captures"


def test_what_is_kept_comes_back() -> None:
    """By its key only."""
    store.save("a", traced(2.0))
    assert store.load("a") == traced(2.0)
    assert store.load("b") is None


def test_a_damaged_file_is_said_and_replaced(home: Path) -> None:
    """Half a file, as a full disk or a copy that was cut off leaves it."""
    store.save("a", traced())
    path = home / "a.json"
    path.write_text(path.read_text()[:200])
    with pytest.raises(FileFormatError, match=r"a\.json is no JSON"):
        store.load("a")
    store.save("a", traced())
    assert store.load("a") == traced()


def test_the_least_recently_used_goes(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three captures two fit; b was read longest ago, though a is older."""
    for age, key in enumerate("ab"):
        store.save(key, traced())
        os.utime(home / f"{key}.json", (age, age))
    store.load("a")
    monkeypatch.setattr(store, "MOST_BYTES", 2 * (home / "a.json").stat().st_size)
    store.save("c", traced())
    assert sorted(path.name for path in home.iterdir()) == ["a.json", "c.json"]


def test_a_folder_that_cannot_be_written_is_no_error(home: Path) -> None:
    """A home that is read-only, or a file in its place, costs the next command its time only."""
    home.parent.joinpath("captures").write_text("in the way")
    store.save("a", traced())
    assert store.load("a") is None
