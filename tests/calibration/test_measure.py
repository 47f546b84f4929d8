"""A machine is calibrated, and figures are put together."""

import pytest
import torch

from anabranch.calibration import messages, pipelines, side_by_side
from anabranch.calibration.machine import this_machine
from anabranch.calibration.measure import calibrate, cluster_of_hosts
from anabranch.calibration.messages import LinkTimes
from anabranch.cluster import BUSY
from tests.calibration import examples


@pytest.mark.dist
def test_a_calibration_of_this_machine(monkeypatch: pytest.MonkeyPatch):
    """As many devices as it has cores, and figures that a cluster accepts."""
    for module, name, value in (
        (messages, "_ROUNDS", 2),
        (pipelines, "_TURNS", 1),
        (pipelines, "_MANY", 4),
        (pipelines, "_STEPS", 2),
        (side_by_side, "_ROUNDS", 1),
        (side_by_side, "_STEPS", 2),
    ):
        monkeypatch.setattr(module, name, value)
    before = torch.random.get_rng_state()
    cluster = calibrate()
    assert torch.equal(before, torch.random.get_rng_state())
    assert cluster.name == f"local:{cluster.cores}"
    assert cluster.num_devices == cluster.cores == this_machine().cores
    assert cluster.levels[0].latency_s > 0
    assert cluster.calibration is not None
    assert cluster.calibration.machine == this_machine()
    assert len(cluster.calibration.slowdown) == cluster.cores
    assert cluster.calibration.memory_bandwidth > 0


def test_hosts_are_levels():
    """Two hosts of two ranks; links between them are four times as slow as inside of one."""
    near, far = (LinkTimes(t, t / 2) for t in (1.0, 4.0))
    found = cluster_of_hosts(examples.calibration(), "two hosts", [*"aabb"], {1: near, 2: far})
    assert [(x.name, x.size) for x in found.levels] == [("host", 2), ("network", 2)]
    assert [(x.latency_s, x.bandwidth) for x in found.levels] == [(1.0, 2.0), (4.0, 0.5)]
    assert found.calibration == examples.calibration()


def test_a_busy_machine_is_said():
    """What others took while it was measured makes figures doubtful, and the user has to know."""
    assert examples.calibration(lost_share=BUSY).remark == ""
    assert "took 40% of a core" in examples.calibration(lost_share=0.4).remark
    assert "took 3.2 cores while" in examples.calibration(lost_share=3.2).remark
