"""Pickles are read as data only."""

import pickle

import pytest

from anabranch.errors import DataError
from benchmarks.datasets.pickles import load_plain


class Attack:
    """Unpickled naively, it would create a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_plain_containers_come_back(tmp_path, protocol):
    """Every protocol writes these without naming a function."""
    content = {"a": [1, -2.5, None, True], "b": ("text", {"c": b"x" if protocol > 2 else 1})}
    (tmp_path / "x.pkl").write_bytes(pickle.dumps(content, protocol))
    assert load_plain(tmp_path / "x.pkl") == content


def test_nothing_is_called(tmp_path):
    """The message names what the file asked for; the file it would have made is not there."""
    (tmp_path / "x.pkl").write_bytes(pickle.dumps({"a": Attack(tmp_path / "made")}))
    with pytest.raises(DataError, match=r"it names .*open"):
        load_plain(tmp_path / "x.pkl")
    assert not (tmp_path / "made").exists()


def test_a_cut_file_is_named(tmp_path):
    """As a full disk leaves it."""
    (tmp_path / "x.pkl").write_bytes(pickle.dumps(list(range(1000)))[:-20])
    with pytest.raises(DataError, match=r"x\.pkl is not a pickle"):
        load_plain(tmp_path / "x.pkl")
