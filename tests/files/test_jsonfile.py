"""JSON files: read with suspicion, written whole or not at all."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from anabranch.cluster import Cluster
from anabranch.errors import FileFormatError
from anabranch.files import (
    load_cluster,
    load_plan,
    load_profile,
    save_cluster,
)
from anabranch.files.jsonfile import read_regular
from tests.files.documents import (
    CLUSTER,
    KINDS,
    PLAN,
    PROFILE,
    edited,
    refusal,
)


def test_file_is_for_people(tmp_path: Path) -> None:
    """One level per line, as a person would have written it."""
    save_cluster(Cluster.preset("summit:8x4"), tmp_path / "c.json")
    assert (tmp_path / "c.json").read_text() == (
        "{\n"
        '  "schema": "anabranch.cluster/1",\n'
        '  "name": "summit:8x4",\n'
        '  "device": "v100",\n'
        '  "memory_bytes": 17179869184,\n'
        '  "cores": 0,\n'
        '  "levels": [\n'
        '    {"name": "node", "size": 4, "bandwidth_bytes_per_s": 45000000000, '
        '"latency_s": 5e-06},\n'
        '    {"name": "network", "size": 8, "bandwidth_bytes_per_s": 12500000000.0, '
        '"latency_s": 1e-05}\n'
        "  ],\n"
        '  "calibration": null\n'
        "}\n"
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        (" \n", "is empty"),
        ("{", "is no JSON: Expecting property name"),
        ('{"a": 1,\n "b" 2}', "is no JSON: Expecting ':' delimiter at line 2, column 6"),
        ("[1, 2]", "holds [1, 2]; a"),
        ("null", "holds null; a"),
        ("NaN", "holds nan; a"),
        ("{}", "key schema is missing"),
        ('{"schema": 1}', "schema is 1; a"),
        ('{"schema": "graph.txt"}', 'schema is "graph.txt"; a'),
        ('{"schema": {}}', "schema is {}; a"),
        ('{"a": {"b": [0, {"c": 1, "c": 1}]}}', "key a.b[1].c is written twice"),
        ("[" * 100_000, "nested too deeply"),
        ("[" * 5000 + "]" * 5000, "nested too deeply"),
        ('{"a": ' + "9" * 5000 + "}", "holds an absurd number"),
        (b"\xff\xfe{}", "is no text in UTF-8 (byte 0)"),
        (b"\x80\x04K\x01.", "is no text in UTF-8"),
    ],
)
def test_not_our_file(tmp_path: Path, kind: str, text: str | bytes, message: str) -> None:
    """Whatever else a file may be, the message says what it is and not only that it is wrong."""
    assert message in refusal(tmp_path / "f.json", KINDS[kind][1], text)


def test_wrong_kind_of_file(tmp_path: Path) -> None:
    """A plan given where a profile was expected, and a file from the future."""
    path = tmp_path / "f.json"
    assert refusal(path, load_profile, json.dumps(PLAN)) == (
        "is a plan (anabranch.plan/1); a profile is needed here, "
        'with "schema": "anabranch.profile/1"'
    )
    newer = edited(PROFILE, ("schema",), "anabranch.profile/2")
    assert 'in version "2" of the format anabranch.profile; this anabranch reads version 1' in (
        refusal(path, load_profile, newer)
    )


def test_no_file(tmp_path: Path) -> None:
    """Missing, a folder, or a name that no file can have."""
    with pytest.raises(FileFormatError, match=r"nothing\.json does not exist"):
        load_plan(tmp_path / "nothing.json")
    with pytest.raises(FileFormatError, match="is a folder"):
        load_plan(tmp_path)
    with pytest.raises(FileFormatError, match="cannot be read"):
        load_plan("a\0b")
    with pytest.raises(FileFormatError, match="cannot be read"):
        load_plan("x" * 5000)


def test_byte_order_mark_is_accepted(tmp_path: Path) -> None:
    """Some editors put one in front; it changes nothing."""
    (tmp_path / "f.json").write_bytes(b"\xef\xbb\xbf" + json.dumps(CLUSTER).encode())
    assert load_cluster(tmp_path / "f.json").name == "two boxes"


def test_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A crash while writing: the old file is still whole and nothing else is left behind."""
    path = tmp_path / "c.json"
    save_cluster(Cluster.preset("summit:8x4"), path)
    before = path.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(FileFormatError, match=r"c\.json cannot be written: No space left"):
        save_cluster(Cluster.preset("summit:2x4"), path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_save_to_no_folder(tmp_path: Path) -> None:
    """The folder has to exist; a folder is no file."""
    with pytest.raises(FileFormatError, match="cannot be written: No such file"):
        save_cluster(Cluster.preset("local:1"), tmp_path / "missing" / "c.json")
    with pytest.raises(FileFormatError, match="cannot be written: Is a directory"):
        save_cluster(Cluster.preset("local:1"), tmp_path)


def test_save_follows_links_and_spares_devices(tmp_path: Path) -> None:
    """A symbolic link keeps pointing at its file, and /dev/null stays what it is."""
    real, link = tmp_path / "real.json", tmp_path / "link.json"
    link.symlink_to(real)
    save_cluster(Cluster.preset("local:1"), link)
    assert link.is_symlink()
    assert load_cluster(real) == load_cluster(link)
    save_cluster(Cluster.preset("local:1"), os.devnull)
    assert not Path(os.devnull).is_file()


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero"), os.mkdir])
def test_only_a_regular_file_is_read_whole(tmp_path, make):
    """A pipe would never begin, /dev/zero never end."""
    make(tmp_path / "odd")
    with pytest.raises(OSError, match=r"no regular file|directory"):
        read_regular(tmp_path / "odd")
