"""Seconds of a hop between two stages and of an all-reduce in one, by devices per machine.

Which devices of a machine (an innermost group of the cluster) a stage has does not matter, so its
place is a tuple of counts, machine by machine::

    (8, 0)   all of the first machine      (4, 4)   half of each
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from anabranch.cluster import Cluster
from anabranch.cost import CostModel
from anabranch.cost.nested_weights import Floats

Place = tuple[int, ...]
"""Devices of one stage on every machine."""

Array = NDArray[Any]


def hop_prices(cluster: Cluster, sources: Array, targets: Array) -> tuple[Floats, Floats]:
    """Seconds per byte of one micro-batch and seconds of latency between two stages: arrays of
    places, [..., machine], that broadcast against each other.

    Replicas hold equal slices, numbered so that a slice stays in its machine where it can. The way
    is as slow as its fullest link: each device's own, or from level 1 on each group's network card,
    which sends what its replicas make beyond what they need (section 5.2).
    """
    sent, got = sources.sum(axis=-1), targets.sum(axis=-1)
    per_byte = np.maximum(1 / sent, 1 / got) / cluster.levels[0].bandwidth
    latency_s = np.full(per_byte.shape, cluster.level_link(0).latency_s)
    # What the groups that a level connects make beyond what they need, or less.
    surplus = sources / sent[..., None] - targets / got[..., None]
    for i in range(1, len(cluster.levels)):
        level = cluster.levels[i]
        most = np.abs(surplus).max(axis=-1)
        crosses = most > 1e-12
        per_byte = np.where(crosses, np.maximum(per_byte, most / level.bandwidth), per_byte)
        latency_s = np.where(crosses, cluster.level_link(i).latency_s, latency_s)
        surplus = surplus.reshape(*surplus.shape[:-1], -1, level.size).sum(axis=-1)
    return per_byte, latency_s


def ring_price(cost: CostModel, place: Place) -> tuple[float, float]:
    """Seconds per byte and of latency of a ring all-reduce."""
    size = cost.cluster.group_sizes[0]
    used = [machine for machine, count in enumerate(place) if count]
    return cost.ring_price((used[0] * size, used[-1] * size), sum(place))
