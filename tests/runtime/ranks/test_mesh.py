"""Devices and ranks."""

from unittest.mock import Mock

import pytest
import torch

from anabranch import launch
from anabranch.device import accelerator
from anabranch.errors import InvalidPlanError
from anabranch.runtime.guards.failure import PeerLostError
from anabranch.runtime.ranks.collectives import MessageCollectives
from anabranch.runtime.ranks.mesh import Mesh


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
        mesh = Mesh([3, 5, 9], timeout=20.0)
        mesh.barrier()  # nobody waits for a rank that has closed
        mesh.close()
        with pytest.raises(PeerLostError, match="this rank has broken its connections"):
            mesh.barrier()
        return mesh.device

    assert launch.run(work, 3, timeout=30.0) == [3, 5, 9]


@pytest.mark.dist
def test_tensors_that_gloo_does_not_take_go_through_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The results are those of a device that it takes; here the CPU plays the other one, whose
    copies are tensors of their own.
    """
    monkeypatch.setattr(accelerator, "has_collectives", lambda device: False)
    monkeypatch.setattr(torch.Tensor, "cpu", torch.Tensor.clone)

    def work() -> list[list[float]]:
        mesh, everyone = Mesh([0, 1], [(0, 1)], timeout=20.0), (0, 1)
        tensors = [torch.full((2,), mesh.rank + 1.0) for _ in range(4)]
        gathered = mesh.start_all_gather(tensors[1], everyone).wait()
        mesh.start_all_reduce(tensors[0], everyone).wait()
        mesh.start_broadcast(tensors[2], 1, everyone).wait()
        mesh.broadcast(tensors[3], 1)
        results = [tensors[0], gathered.flatten(), *tensors[2:]]
        return [result.tolist() for result in results]

    assert launch.run(work, 2, timeout=30.0) == [[[3, 3], [1, 1, 2, 2], [2, 2], [2, 2]]] * 2


@pytest.mark.parametrize("name", ["all_reduce", "all_gather"])
def test_a_sum_that_failed_fails_whenever_it_is_waited_for(name: str) -> None:
    """Never does it pass this rank's own term for the sum, which looks like another batch."""

    def wait() -> list[torch.Tensor]:
        raise PeerLostError("gone")

    transport = Mock()
    transport.receive.return_value.wait = wait
    pending = getattr(MessageCollectives(transport, 0), name)(torch.ones(2), (0, 1), tag=-1)
    for _ in range(2):
        with pytest.raises(PeerLostError):
            pending.wait()
