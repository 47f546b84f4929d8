"""Ports of a cluster as numbers: those of devices, out and in, then those of groups by level."""

from __future__ import annotations

from anabranch.planner.auto.compiled.jit import compiled
from anabranch.planner.auto.tables import Ints, Records


@compiled
def level_of(levels: Records, a: int, b: int) -> int:
    """The level of the link between two devices."""
    level = 0
    while a // levels[level].group != b // levels[level].group:
        level += 1
    return level


@compiled
def put_ports(levels: Records, a: int, b: int, ports: Ints) -> int:
    """Write what a transfer from a to b occupies, as ``Cluster.ports`` says; how many they are."""
    devices = levels[len(levels) - 1].group
    ports[0], ports[1] = a, devices + b
    first, level = 2 * devices, level_of(levels, a, b)
    for i in range(1, level + 1):
        size = levels[i - 1].group
        ports[2 * i] = first + a // size
        ports[2 * i + 1] = first + devices // size + b // size
        first += 2 * (devices // size)
    return 2 * (level + 1)


@compiled
def num_ports(levels: Records) -> int:
    """All ports of the cluster."""
    count = 2 * levels[len(levels) - 1].group
    for level in range(1, len(levels)):
        count += 2 * (levels[len(levels) - 1].group // levels[level - 1].group)
    return int(count)
