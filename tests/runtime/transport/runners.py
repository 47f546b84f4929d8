"""Runs one scenario over each transport."""

import os
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from anabranch import launch
from anabranch.runtime.ranks.mesh import Mesh
from anabranch.runtime.transport import HostTransport, ProcessGroupTransport, Transport, meet
from anabranch.runtime.transport.memory import Segment
from tests.runtime.transport.local import Hub, LocalTransport

CPU = torch.device("cpu")
Scenario = Callable[[Transport, int], Any]
Runner = Callable[[Scenario, int], list[Any]]


def in_threads(scenario: Scenario, num_ranks: int) -> list[Any]:
    """Between threads."""
    hub = Hub(timeout=20.0)
    results: list[Any] = [None] * num_ranks

    def work(rank: int) -> None:
        results[rank] = scenario(LocalTransport(hub, rank), rank)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return results


def in_processes(scenario: Scenario, num_ranks: int) -> list[Any]:
    """Between processes, through Gloo."""

    def work() -> Any:
        return scenario(gloo_transport(), dist.get_rank())

    return launch.run(work, num_ranks, timeout=60.0)


def on_one_host(scenario: Scenario, num_ranks: int) -> list[Any]:
    """Between processes, through shared memory."""

    def work() -> Any:
        return scenario(host_transport(), dist.get_rank())

    return launch.run(work, num_ranks, timeout=60.0)


def exchange(mine: bytes) -> list[bytes]:
    """Everybody's bytes."""
    tensor = torch.tensor(list(mine), dtype=torch.uint8)
    everybody = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(everybody, tensor)
    return [bytes(theirs.tolist()) for theirs in everybody]


def host_transport(timeout: float = 20.0) -> HostTransport:
    """Of this rank, to all others."""
    segment, peers = meet(dist.get_rank(), exchange)
    assert segment is not None
    return HostTransport(segment, peers, timeout)


def gloo_transport(timeout: float = 20.0) -> ProcessGroupTransport:
    """Of this rank, to all others."""
    group = dist.new_group()
    dist.barrier()  # whoever leaves at once would disturb those who still connect
    return ProcessGroupTransport(group, timeout)


def mesh_of_all(timeout: float = 20.0) -> Mesh:
    """A mesh of all ranks."""
    return Mesh(range(dist.get_world_size()), timeout=timeout)


def used_bytes(segment: Segment) -> int:
    """Bytes of memory that messages occupy, including blocks that are free."""
    return os.fstat(segment.file).st_blocks * 512


def receive(transport: Transport, like: Tensor, rank: int, tag: int = 0) -> Tensor:
    """The only tensor of the next message."""
    return transport.receive([(like.shape, like.dtype)], CPU, rank, tag).wait()[0]
