"""Transfer times between two stages, by devices per machine.

Which devices of a machine (an innermost group of the cluster) a stage has does not matter, so its
place is a tuple of counts, machine by machine::

    (8, 0)   all of the first machine      (4, 4)   half of each
"""

from __future__ import annotations

from typing import Any

import numpy as np

from anabranch.cluster import Cluster
from anabranch.cost.nested_weights import Ints

Place = tuple[int, ...]
"""Devices of one stage on every machine."""

Links = Any
"""A ``numpy.recarray``: per level of a cluster its bandwidth, the latency of a way that climbs to
it, and of each of the groups that it connects the machines, devices and cards.
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
    """Seconds per byte of one micro-batch and seconds of latency between two stages, which are at
    these rows of ``places``, [place, machine].

    Replicas hold equal slices, numbered so that a slice stays in its machine where it can. The way
    is as slow as its fullest link: each device's own, or from level 1 on each group's network card,
    which sends what its replicas make beyond what they need (section 5.2), in equal parts if they
    have several: those of devices in a row.
    """
    sent, got, machines = 0, 0, places.shape[1]
    for m in range(machines):
        sent += places[source, m]
        got += places[target, m]
    per_byte = max(1 / sent, 1 / got) / links[0].bandwidth
    latency_s = links[0].latency_s
    for i in range(1, len(links)):
        # What the groups that a level connects make beyond what they need, or less.
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
