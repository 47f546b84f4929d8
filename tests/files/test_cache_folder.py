"""Where commands keep things."""

from pathlib import Path

import pytest

from anabranch.files.cache_folder import cache_folder


def test_the_folder_is_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our own variable, then the platform's, of which relative paths are ignored, then the home."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "b"))
    monkeypatch.setenv("ANABRANCH_CACHE", str(tmp_path / "a"))
    assert cache_folder() == tmp_path / "a"
    monkeypatch.delenv("ANABRANCH_CACHE")
    assert cache_folder() == tmp_path / "b" / "anabranch"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_folder() == tmp_path / ".cache" / "anabranch"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == tmp_path / ".cache" / "anabranch"
