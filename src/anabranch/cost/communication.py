"""Seconds of messages and all-reduces on the links of a cluster."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from anabranch.cluster import Cluster
from anabranch.cost.buckets import BUCKET_BYTES
from anabranch.cost.footprint import Number


class Route(NamedTuple):
    """The way from one device to another: seconds per byte and of latency, and the ports on the
    way, as ``Cluster.ports`` numbers them.
    """

    per_byte_s: float
    latency_s: float
    ports: tuple[int, ...]


def transfer_s(nbytes: Number, per_byte_s: Number, latency_s: Number) -> Number:
    """Return the seconds until bytes have arrived; 0 for no bytes."""
    return nbytes * per_byte_s + (nbytes > 0) * latency_s


def all_reduce_price(
    bandwidth: float, latency_s: float, ranks: int, updates: int = 1
) -> tuple[float, float]:
    """Return the seconds per byte and of latency of all-reduces of one message, for ``transfer_s``.

    Each rank sends as many bytes as in a ring, in as many steps as two binary trees take (Sanders,
    Speck and Traff, *Two-tree algorithms for full bandwidth broadcast, reduction and scan*, 2009),
    as NCCL does for many ranks. The steps of a ring, ``2 (ranks - 1)``, would be most of the time
    from some hundred ranks on. Gloo has a ring alone.

    Args:
        bandwidth: of the slowest link among the ranks, see ``Cluster.ring``, as for the latency.
        ranks: number of ranks that sum their gradients.
        updates: number of all-reduces of the gradients.
    """
    steps = 2 * math.ceil(math.log2(ranks))
    return 2 * (ranks - 1) / ranks / bandwidth * updates, steps * latency_s * updates


def all_reduce_s(nbytes: Number, per_byte_s: Number, latency_s: Number) -> Number:
    """Seconds of an all-reduce in full buckets, one after the other, at an ``all_reduce_price``."""
    return nbytes * per_byte_s + np.maximum(nbytes > 0, nbytes / BUCKET_BYTES) * latency_s


def border_price(cluster: Cluster, devices: int) -> float:
    """Return the seconds that each of ``devices`` of a stage pays per byte that crosses its border.

    From level 1 on the devices of a group share its network cards. All bytes are taken to leave the
    node, unless the whole cluster is one node.
    """
    worst = 1 / cluster.levels[0].bandwidth
    for level in range(1, len(cluster.levels)):
        group = cluster.group_sizes[level - 1]
        if cluster.num_devices > group:
            shared = -(-group // cluster.cards[level])
            worst = max(worst, min(devices, shared) / cluster.levels[level].bandwidth)
    return worst
