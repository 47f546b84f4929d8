"""Placement of stages with known numbers of devices.

Stages that need whole groups of a level come first (a rack, then a node), then the others. Each
goes to the first group with room, at the innermost level that has one. So its replicas lie in one
node if possible, else in one rack.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

FEW_STAGES = 8
"""Most stages of a plan that are also tried spread over nodes: with more, all-reduces and transfers
share cards.
"""


def place(devices: Sequence[int], sizes: Sequence[int]) -> list[list[int]]:
    """Return device numbers for stages with these numbers of devices; empty if there is no room.

    Args:
        sizes: devices in a group of each level, innermost first, as ``Cluster.group_sizes``.
    """
    total, node = sum(devices), sizes[0]
    free = [list(range(start, min(start + node, total))) for start in range(0, total, node)]
    result: list[list[int]] = [[] for _ in devices]

    def rank(s: int) -> tuple[int, int]:
        return -sum(devices[s] >= size for size in sizes), s

    for s in sorted(range(len(devices)), key=rank):
        wanted, taken = devices[s], []
        for left in _room(free, wanted, sizes):
            some = min(wanted, len(left))
            taken.append(left[:some])
            left[:] = left[some:]
            wanted -= some
        if wanted:
            return []
        free = [left for left in free if left]
        result[s] = [device for left in sorted(taken) for device in left]
    return result


def _room(free: Sequence[list[int]], wanted: int, sizes: Sequence[int]) -> list[list[int]]:
    """Return nodes with ``wanted`` free devices in all, in the smallest group that has as many."""
    for level, size in enumerate(sizes):
        if wanted > size:
            continue
        for _, members in groupby(free, key=lambda left: left[0] // size):
            nodes = list(members)
            if sum(map(len, nodes)) >= wanted:
                return _fullest_first(nodes, sizes[:level])
    return []


def _fullest_first(nodes: list[list[int]], sizes: Sequence[int]) -> list[list[int]]:
    """Sort nodes by their groups at each level below, those with most free devices first."""
    if not sizes:
        return nodes
    below = [list(left) for _, left in groupby(nodes, key=lambda left: left[0] // sizes[-1])]
    below.sort(key=lambda members: -sum(map(len, members)))
    return [left for members in below for left in _fullest_first(members, sizes[:-1])]


def placements(
    counts: Sequence[int], height: Sequence[int], sizes: Sequence[int]
) -> Iterator[list[list[int]]]:
    """Generate placements of stages in topological order, up to four without duplicates.

    Branch after branch, which keeps a branch in a node; from the sink backwards, which keeps the
    last stages of the branches near their join; and, for plans of few stages, each stage spread
    over all nodes or all racks, so that only all-reduces leave them (DAPPLE's "scatter first").

    Args:
        counts: devices of each stage.
        height: of each stage, its longest distance to a sink.
        sizes: as for ``place``.
    """
    forward = list(range(len(counts)))
    ways: list[list[list[int]]] = []
    for order in (forward, sorted(forward, key=lambda s: (height[s], s))):
        placed = place([counts[s] for s in order], sizes)
        where = dict(zip(order, placed, strict=False))
        ways.append([where[s] for s in forward] if placed else [])
    if len(counts) <= FEW_STAGES:
        ways += [scatter(counts, size) for size in sizes[:-1]]
    for i, devices in enumerate(ways):
        if devices and devices not in ways[:i]:
            yield devices


def scatter(replicas: Sequence[int], node: int) -> list[list[int]]:
    """Return device numbers for stages spread over all nodes (or racks) as evenly as possible.

    Empty if there is one node only, or no stage of several devices.
    """
    total = sum(replicas)
    free = [list(range(start, min(start + node, total))) for start in range(0, total, node)]
    if len(free) == 1 or max(replicas) == 1:
        return []
    result: list[list[int]] = [[] for _ in replicas]
    for s in sorted(range(len(replicas)), key=lambda s: (-replicas[s], s)):
        for _ in range(replicas[s]):
            most = max(free, key=len)
            result[s].append(most.pop(0))
        result[s].sort()
    return result
