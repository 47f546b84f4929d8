"""Transfer times between two stages, by devices per machine.

Which devices of a machine (an innermost group of the cluster) a stage has does not matter, so its
place is a tuple of counts, machine by machine::

    (8, 0)   all of the first machine      (4, 4)   half of each
"""

from __future__ import annotations

from typing import Any

import numpy as np

from anabranch.cluster import Cluster
from anabranch.cost.nested_sets import Ints

Place = tuple[int, ...]
"""Number of devices of one stage on each machine."""

Links = Any
"""A ``numpy.recarray`` of the levels of a cluster: bandwidth, latency of a way that climbs to the
level, and machines, devices and cards of each group that it connects.
"""

_LINK = np.dtype(
    [("bandwidth", float), ("latency_s", float)]
    + [(count, np.int64) for count in ("machines", "devices", "cards")]
)


def links(cluster: Cluster) -> Links:
    """Return the levels of a cluster as records."""
    link, sizes = cluster.level_link, (cluster.group_sizes[0], *cluster.group_sizes)
    records = [
        (level.bandwidth, link(i).latency_s, sizes[i] // sizes[0], sizes[i], cluster.cards[i])
        for i, level in enumerate(cluster.levels)
    ]
    return np.array(records, _LINK).view(np.recarray)


def hop_price(links: Links, places: Ints, source: int, target: int) -> tuple[float, float]:
    """Return seconds per byte of a micro-batch, and of latency, between two stages.

    Replicas hold equal slices, numbered so that a slice stays in its machine if possible. The way
    is as slow as its fullest link: a device's own, or from level 1 on a group's network card, which
    sends what the group makes beyond what it needs (section 5.2). Several cards send equal parts.

    Args:
        source, target: rows of ``places``, [place, machine].
    """
    sent, got, machines = 0, 0, places.shape[1]
    for m in range(machines):
        sent += places[source, m]
        got += places[target, m]
    per_byte = max(1 / sent, 1 / got) / links[0].bandwidth
    latency_s = links[0].latency_s
    for i in range(1, len(links)):
        # Largest surplus or need of a group that the level connects, as a share, per card.
        most, size = 0.0, links[i].machines
        for first in range(0, machines, size):
            surplus, senders, receivers = 0.0, 0, 0
            for m in range(first, first + size):
                surplus += places[source, m] / sent - places[target, m] / got
                senders += places[source, m]
                receivers += places[target, m]
            ends = senders if surplus > 0 else receivers
            if ends > 0:
                most = max(most, abs(surplus) / -(-ends * links[i].cards // links[i].devices))
        if most > 1e-12:
            per_byte = max(per_byte, most / links[i].bandwidth)
            latency_s = links[i].latency_s
    return per_byte, latency_s
