"""Calibration of the machine, or of the hosts of a torchrun job: one cluster with its figures."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Sequence
from datetime import UTC, datetime

import torch
import torch.distributed as dist
from torch import nn

from anabranch import launch
from anabranch.calibration.machine import OtherLoad, this_machine
from anabranch.calibration.messages import LinkTimes, exchange
from anabranch.calibration.pipelines import measure_overheads
from anabranch.calibration.side_by_side import measure_slowdown
from anabranch.cluster import Calibration, Cluster, Level
from anabranch.device.host import host
from anabranch.runtime.measurement.workload import measure_update
from anabranch.runtime.ranks.mesh import Mesh
from anabranch.workload import Workload, adamw

_PEERS = 8
"""Most ranks of a host, and most other hosts, to which links are measured."""


def calibrate() -> Cluster:
    """Calibrate this machine on local ranks, in less than 10 s if it has few cores; the state of
    random numbers is restored.

    Returns:
        A cluster of as many devices as cores.
    """
    with torch.random.fork_rng(devices=[]):
        calibration = _calibration()
        cores = calibration.machine.cores
        hosts, links = launch.run(_links, 2)[0]
        return cluster_of_hosts(calibration, f"local:{cores}", hosts[:1] * cores, links)


def calibrate_job() -> Cluster | None:
    """Calibrate the hosts of a torchrun job: links from the first rank to other ranks, everything
    else on local ranks of its host. Call it on all ranks.

    Returns:
        A cluster of as many devices as ranks; None on other ranks than the first.
    """
    with torch.random.fork_rng(devices=[]):
        is_first = os.environ["RANK"] == "0"
        calibration = _calibration() if is_first else None
        hosts, links = _links()
        if calibration is None:
            return None
        return cluster_of_hosts(calibration, f"calibrated on {platform.node()}", hosts, links)


def _calibration() -> Calibration:
    """Measure everything but links on local ranks."""
    load, machine = OtherLoad(), this_machine()
    overheads = measure_overheads()
    return Calibration(
        machine,
        datetime.now(UTC).date().isoformat(),
        measure_slowdown(machine.cores),
        *overheads,
        memory_bandwidth=_memory_bandwidth(),
        lost_share=load.cores(),
    )


def _memory_bandwidth() -> float:
    """Measure the bytes/s of an update of Adam: it reads weight, gradient and two moments, and
    writes all but the gradient.
    """
    layers = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(4)))
    return 7 / measure_update(Workload(layers, (torch.zeros(1, 1024),), optimizer=adamw)).byte_s


def _links() -> tuple[list[str], dict[int, LinkTimes]]:
    """Return hosts by rank, and exchanges with the first rank by peer; call it on all ranks."""
    size = int(os.environ.get("WORLD_SIZE", "0")) or dist.get_world_size()
    mesh = Mesh(range(size))
    hosts, transport = mesh.gather(host()), mesh.transport()
    near = [rank for rank in range(1, size) if hosts[rank] == hosts[0]]
    far = [hosts.index(host) for host in dict.fromkeys(hosts) if host != hosts[0]]
    links: dict[int, LinkTimes] = {}
    for peer in (*near[:_PEERS], *far[:_PEERS]):
        mesh.barrier()
        if transport is not None and mesh.rank in (0, peer):
            other, is_first = (peer, True) if mesh.rank == 0 else (0, False)
            links[peer] = exchange(transport, other, first=is_first, tag=peer)
    if transport is not None:
        transport.flush()
        mesh.barrier()
        transport.close()
    return hosts, links


def cluster_of_hosts(
    calibration: Calibration, name: str, hosts: Sequence[str], links: dict[int, LinkTimes]
) -> Cluster:
    """Return the cluster of some ranks, with the median link inside a host and between hosts.

    Args:
        hosts: host of each rank.
        links: links from the first rank, by the other rank.
    """
    count = len(set(hosts))
    preset = Cluster.preset(f"local:{len(hosts) // count}")
    near = [link for rank, link in links.items() if hosts[rank] == hosts[0]]
    far = [link for rank, link in links.items() if hosts[rank] != hosts[0]]
    levels = [_level("host", len(hosts) // count, near) if near else preset.levels[0]]
    if far:
        levels.append(_level("network", count, far))
    return Cluster(
        name, "cpu", preset.memory_bytes, tuple(levels), calibration.machine.cores, calibration
    )


def _level(name: str, size: int, exchanges: Sequence[LinkTimes]) -> Level:
    byte_s = statistics.median(exchange.byte_s for exchange in exchanges)
    latency_s = statistics.median(exchange.latency_s for exchange in exchanges)
    return Level(name, size, 1 / max(byte_s, 1e-15), latency_s)
