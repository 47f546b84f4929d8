"""The whole calibration, on local ranks, with windows too short for good figures."""

from __future__ import annotations

import pytest

from anabranch.calibration import side_by_side
from anabranch.calibration.machine import this_machine
from anabranch.calibration.measure import calibrate
from anabranch.cluster import BUSY
from tests.calibration import examples


@pytest.mark.dist
def test_a_calibration_of_this_machine(monkeypatch: pytest.MonkeyPatch):
    """Two of its ranks, all links between them, and figures that a cluster accepts."""
    monkeypatch.setattr(side_by_side, "_ROUNDS", 1)
    monkeypatch.setattr(side_by_side, "_WINDOW_S", 0.01)
    monkeypatch.setattr(side_by_side, "counts", lambda cores, most: (1, 2))
    told: list[tuple[int, int]] = []
    found = calibrate(lambda done, total: told.append((done, total)))
    cluster, calibration = found.cluster, found.cluster.calibration
    assert cluster.name == f"local:{cluster.cores}"
    assert cluster.num_devices == cluster.cores == this_machine().cores
    assert list(found.links) == [(0, 1)]
    assert calibration is not None
    assert calibration.machine == this_machine()
    assert len(calibration.slowdown) == 2
    # A message costs something at both ends, and a link has no infinite speed.
    assert min(calibration.send_s, calibration.receive_s, cluster.levels[0].latency_s) > 0
    assert 1e7 < cluster.levels[0].bandwidth < 1e13
    assert calibration.memory_bandwidth > 1e7


def test_a_busy_machine_is_said():
    """What others took while it was measured makes figures doubtful, and the user has to know."""
    assert examples.calibration(lost_share=BUSY).remark == ""
    assert "took 40% of a core" in examples.calibration(lost_share=0.4).remark
