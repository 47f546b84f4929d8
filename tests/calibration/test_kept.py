"""Local ranks with the calibration in the user's cache, and when it is not used."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from anabranch.calibration import kept
from anabranch.calibration.kept import cache_file, calibrated, keep, remarks
from anabranch.calibration.machine import this_machine
from anabranch.cluster import Cluster
from tests.calibration.examples import calibration, cluster


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ANABRANCH_CACHE", str(tmp_path))
    return tmp_path


def test_local_ranks_have_what_was_kept():
    """Four ranks have the links and figures of the two that were measured, and it is said."""
    keep(cluster(2))
    found, said = calibrated(Cluster.preset("local:4"))
    assert found.num_devices == 4
    assert found.levels[0].bandwidth == 10.0
    assert found.levels[0].latency_s == 8.0
    assert found.calibration == calibration()
    assert found.memory_bytes == Cluster.preset("local:4").memory_bytes
    assert said == "local:4 as calibrated on 2026-01-31"


def test_one_of_a_busy_machine_is_used_with_a_remark():
    """It is better than none, and whoever reads the prediction should know."""
    keep(cluster(2, lost_share=0.4))
    found, said = calibrated(Cluster.preset("local:4"))
    assert found.calibration is not None
    assert "took 40% of a core while this machine was calibrated" in said
    assert "took 40% of a core" in calibrated(found)[1], "a file with it says so as well"


def test_without_one_the_remedy_is_named():
    """A prediction that leaves something out says so."""
    found, said = calibrated(Cluster.preset("local:4"))
    assert found == Cluster.preset("local:4")
    assert "local:4 is not calibrated" in said
    assert "anabranch cluster --calibrate" in said


def test_a_calibration_of_another_machine_is_not_used():
    """Neither of other hardware nor of another torch, and the difference is named."""
    keep(cluster(2, machine=replace(this_machine(), cores=96)))
    found, said = calibrated(Cluster.preset("local:4"))
    assert found == Cluster.preset("local:4")
    assert "it has 96 cores" in said
    assert "so it is not used" in said


def test_a_calibration_that_was_measured_otherwise_is_not_used():
    """Files without a version have an older one, and may have figures that nobody knows any more;
    of a plan's cluster it is said.
    """
    older = cluster(2, version=1)
    file = keep(older)
    document = json.loads(file.read_text())
    del document["calibration"]["version"]
    file.write_text(json.dumps(document))
    found, said = calibrated(Cluster.preset("local:4"))
    assert found == Cluster.preset("local:4")
    assert "was measured in another way than anabranch does now, so it is not used" in said
    assert "anabranch cluster --calibrate" in said
    found, said = calibrated(older)
    assert found == older
    assert "in another way than anabranch does now, so predictions for this machine are off" in said


def test_a_damaged_file_is_said_and_left():
    """Planning goes on without it."""
    cache_file().write_text("{")
    found, said = calibrated(Cluster.preset("local:2"))
    assert found == Cluster.preset("local:2")
    assert "the calibration is not used" in said
    assert "is no JSON" in said


def test_other_clusters_are_left_alone():
    """Presets of other machines and the user's own; a foreign calibration of these is said."""
    keep(cluster(2))
    summit = Cluster.preset("summit:2x4")
    assert calibrated(summit) == (summit, "")
    mine = cluster(2)
    assert calibrated(mine) == (mine, "")
    theirs = cluster(2, machine=replace(this_machine(), processor="Z80"))
    found, said = calibrated(theirs)
    assert found == theirs
    assert "its processor is Z80" in said
    assert "so predictions for this machine are off" in said


def test_remarks_on_predictions(monkeypatch: pytest.MonkeyPatch):
    """Of two cores others have 1.5, for which no prediction holds; .1 of a core is nothing. Three
    ranks on two cores are hard to predict. A cluster that is not this machine does not care.
    """
    busy = [1.5]
    monkeypatch.setattr(kept.OtherLoad, "cores", lambda self: busy[0])
    local = cluster(2, machine=replace(this_machine(), cores=2))
    (said,) = remarks(local, 0.0)
    assert "others keep 1.5 of the 2 cores busy" in said
    assert remarks(replace(local, name="summit:1x2"), 0.0) == []
    busy[0] = 0.1
    assert remarks(local, 0.0) == []
    (said,) = remarks(cluster(3, machine=this_machine()), 0.0)
    assert said.startswith("3 ranks take turns on 2 cores: steps may take a third more or less")
    (said,) = remarks(cluster(9, machine=this_machine()), 0.0)
    assert "9 ranks take turns on 2 cores: steps may take many times as long" in said
