"""Cluster files: what is written comes back; presets by name."""

import json
from pathlib import Path

import pytest
from hypothesis import given

from anabranch.cluster import Cluster
from anabranch.errors import FileFormatError
from anabranch.files import load_cluster, save_cluster
from tests.files.documents import CLUSTER, same_folder
from tests.strategies import clusters


def test_cluster_by_eye(tmp_path: Path) -> None:
    """The document above is two Summit nodes under another name."""
    (tmp_path / "c.json").write_text(json.dumps(CLUSTER))
    cluster = load_cluster(tmp_path / "c.json")
    assert cluster.name == "two boxes"
    assert cluster.levels == Cluster.preset("summit:2x4").levels
    assert cluster.memory_bytes == 16 * 2**30


def test_cards_are_written_where_there_are_several(tmp_path: Path) -> None:
    """So that files of one card per group stay as they were."""
    for name, cards in (("summit:2x4", [{}, {}]), ("dgx-h100:2x8", [{}, {"cards": 8}])):
        save_cluster(Cluster.preset(name), tmp_path / "c.json")
        assert load_cluster(tmp_path / "c.json") == Cluster.preset(name)
        levels = json.loads((tmp_path / "c.json").read_text())["levels"]
        assert [{k: v for k, v in level.items() if k == "cards"} for level in levels] == cards


@same_folder
@given(cluster=clusters())
def test_cluster_comes_back(cluster: Cluster, tmp_path: Path) -> None:
    """What is saved loads as an equal cluster."""
    save_cluster(cluster, tmp_path / "c.json")
    assert load_cluster(str(tmp_path / "c.json")) == cluster


def test_a_calibration_that_cannot_be_is_refused(tmp_path: Path) -> None:
    """Ranks side by side are never faster than one alone; a date has a form."""
    calibration = {
        "machine": {"processor": "Z80", "cores": 1, "torch": "2.13.0"},
        "date": "2026-01-31",
        "slowdown": [1.0, 2.0],
        "message_s": 0.5,
        "pass_s": 0.25,
        "step_s": 0.0,
        "all_reduce_byte_s": 0.125,
        "memory_bytes_per_s": 1.0,
    }
    file = tmp_path / "c.json"
    file.write_text(json.dumps({**CLUSTER, "calibration": calibration}))
    assert load_cluster(file).calibration is not None
    for key, value, said in (
        ("slowdown", [1.0, 3.0, 2.0], "falls with more ranks"),
        ("slowdown", [2.0], "does not begin with 1 for one rank alone"),
        ("date", "yesterday", "date"),
        ("send_s", 1.0, "unknown key calibration.send_s"),  # of before the first release
    ):
        file.write_text(json.dumps({**CLUSTER, "calibration": {**calibration, key: value}}))
        with pytest.raises(FileFormatError, match=said):
            load_cluster(file)


def test_cluster_by_name_or_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A preset's name, a path, or a file in the working folder; else the presets are listed."""
    monkeypatch.chdir(tmp_path)
    assert load_cluster("summit:2x4") == Cluster.preset("summit:2x4")
    Path("boxes").write_text(json.dumps(CLUSTER))
    assert load_cluster("boxes").name == "two boxes"
    with pytest.raises(FileFormatError, match=r"boxes\.json does not exist"):
        load_cluster("boxes.json")
    with pytest.raises(ValueError, match=r"unknown cluster 'summit'; write a JSON file or one of"):
        load_cluster("summit")
    with pytest.raises(ValueError, match="unknown cluster"):
        load_cluster("x\0")
