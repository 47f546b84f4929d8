"""Devices and ranks."""

from __future__ import annotations

import pytest
import torch

from anabranch import launch
from anabranch.errors import InvalidPlanError
from anabranch.runtime.mesh import Mesh


def test_one_device_needs_no_processes() -> None:
    """Every collective is the identity."""
    mesh = Mesh([7])
    tensor = torch.ones(2)
    mesh.broadcast(tensor, 0)
    mesh.barrier()
    assert mesh.all_reduce(tensor).tolist() == [1, 1]
    assert (mesh.rank, mesh.device, mesh.transport()) == (0, 7, None)


def test_a_plan_for_more_devices_says_how_to_start_them() -> None:
    with pytest.raises(InvalidPlanError, match=r"4 devices, but 1 process runs it.*per-node 4"):
        Mesh([0, 1, 2, 3])


@pytest.mark.dist
def test_ranks_are_devices_in_order() -> None:
    """Whatever the devices' numbers are."""

    def work() -> int:
        return Mesh([3, 5, 9], timeout=20.0).device

    assert launch.run(work, 3, timeout=30.0) == [3, 5, 9]
