"""What a hop between two stages and an all-reduce inside one cost, by devices per machine.

A machine is an innermost group of the cluster. Which of its devices a stage has does not matter,
so a stage's place is a tuple of counts, machine by machine::

    (8, 0)   all of the first machine      (4, 4)   half of each
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from anabranch.cluster import Cluster

Place = tuple[int, ...]
"""Devices of one stage on every machine."""


def counts(cluster: Cluster, devices: Sequence[int]) -> Place:
    """Devices per machine."""
    size = cluster.group_sizes[0]
    result = [0] * (cluster.num_devices // size)
    for device in devices:
        result[device // size] += 1
    return tuple(result)


def hop_price(cluster: Cluster, source: Place, target: Place) -> tuple[float, float]:
    """Seconds per byte of one micro-batch and seconds of latency between two stages.

    Replicas hold equal slices, numbered so that a slice stays in its machine where it can. The way
    is as slow as its fullest link: each device's own, and from level 1 on the network card of each
    group, which sends what its replicas make more than they need (split and concatenation, section
    5.2).
    """
    sent, got = sum(source), sum(target)
    worst = max(1 / sent, 1 / got) / cluster.levels[0].bandwidth
    level = 0
    for i, a, b in _groups(cluster, source, target):
        surplus = max(abs(x / sent - y / got) for x, y in zip(a, b, strict=True))
        if surplus > 1e-12:
            worst = max(worst, surplus / cluster.levels[i].bandwidth)
            level = i
    return worst, cluster.level_link(level).latency_s


def _groups(
    cluster: Cluster, source: Place, target: Place
) -> Iterator[tuple[int, list[int], list[int]]]:
    """Per level above the innermost, devices of both stages in the groups that it connects."""
    a, b = list(source), list(target)
    for i in range(1, len(cluster.levels)):
        yield i, a, b
        size = cluster.levels[i].size
        a = [sum(a[k : k + size]) for k in range(0, len(a), size)]
        b = [sum(b[k : k + size]) for k in range(0, len(b), size)]


def ring_price(cluster: Cluster, place: Place) -> tuple[float, float]:
    """Seconds per byte and of latency of a ring all-reduce, as ``CostModel.allreduce_s``."""
    d = sum(place)
    if d == 1:
        return 0.0, 0.0
    size = cluster.group_sizes[0]
    used = [m for m, count in enumerate(place) if count]
    first, last = used[0] * size, used[-1] * size
    link = cluster.link(first, last)
    return 2 * (d - 1) / d / link.bandwidth, 2 * (d - 1) * link.latency_s
