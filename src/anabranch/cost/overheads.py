"""Seconds of a step besides compute of operators and time on links.

::

    message      fixed, for the processor at each end; none for no bytes
    pass         fixed, for each forward and backward besides its operators
    step         fixed, for each device
    all-reduce   per byte and other rank + messages per bucket, for each processor
    agreement    on loss and metrics: every rank sends its totals to all others and takes theirs
    update       fixed + per tensor + per byte of a device's trainable parameters, as measured for
                 the workload's optimizer; otherwise bytes moved / bandwidth of the memory, where
                 weights and optimizer state are read and written and gradients read:

                     bytes moved = (3 + 2 * optimizer state per weight) * bytes of weights

    reading      of a batch, per sample, as measured for the workload's data
    slowdown     of devices that share processors and caches, by how many of them compute

``communication`` has the time of messages and all-reduces on links. Without a calibration a cluster
has only updates and reading.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from anabranch.cluster import Calibration, Cluster, Machine
from anabranch.profile.data_sheets import DATA_SHEETS
from anabranch.profile.profile import ADAM_STATE, Profile, UpdateCost

UNCALIBRATED = Calibration(
    Machine("any", 1, "any"),
    "1970-01-01",
    slowdown=(1.0,),
    message_s=0.0,
    pass_s=0.0,
    step_s=0.0,
    all_reduce_byte_s=0.0,
    memory_bandwidth=math.inf,
)
"""Stands for the calibration of a cluster that has none."""


def all_reduce_work_s(
    calibration: Calibration, nbytes: float, ranks: int, *, buckets: int, shares: bool = False
) -> float:
    """Return processor seconds of a rank for the all-reduce of gradients.

    Args:
        shares: whether ranks share the optimizer's state; then one rank adds up each gradient.
    """
    added = (ranks - 1) / (ranks if shares else 1)
    messages_s = all_gather_work_s(calibration, ranks, buckets=buckets)
    return calibration.all_reduce_byte_s * nbytes * added + messages_s


def all_gather_work_s(calibration: Calibration, ranks: int, *, buckets: int) -> float:
    """Return processor seconds of a rank that sends its updated parameters to all others and
    receives theirs: one message per bucket each way.
    """
    return 2 * (ranks - 1) * buckets * calibration.message_s


def agreement_s(cluster: Cluster, ranks: int) -> tuple[float, float]:
    """Return processor seconds of a rank that sends its totals to all others, and the latency
    behind that; receiving theirs takes as many seconds again. 0 for a single rank.
    """
    if cluster.calibration is None or ranks < 2:
        return 0.0, 0.0
    device_s = (ranks - 1) * cluster.calibration.message_s
    return device_s, cluster.link(0, ranks - 1).latency_s


def update_cost(profile: Profile, cluster: Cluster, factor: float | None) -> UpdateCost:
    """Return the price of updates on a device: as measured, or else by the memory bandwidth of the
    device's data sheet or of the cluster's calibration; 0 where neither is known. A ``factor``
    replaces the bytes of the optimizer's state.
    """
    if profile.update is not None:
        return profile.update if factor is None else replace(profile.update, state=factor)
    state = ADAM_STATE if factor is None else factor
    if profile.source == "estimated" and profile.device in DATA_SHEETS:
        bandwidth = DATA_SHEETS[profile.device].effective_bandwidth
    else:
        bandwidth = (cluster.calibration or UNCALIBRATED).memory_bandwidth
    return UpdateCost(0.0, 0.0, (3 + 2 * state) / bandwidth, state=state)


def slowdown_of(slowdown: Sequence[float] | NDArray[np.float64], jobs: int) -> float:
    """Return the factor by which ``jobs`` jobs at once take longer than one. Beyond the measured
    counts it grows in proportion to the jobs.
    """
    if jobs <= len(slowdown):
        return float(slowdown[jobs - 1])
    return float(slowdown[-1] * jobs / len(slowdown))


def computed_at_once(cluster: Cluster) -> float:
    """Return how many devices' compute all devices do at once: fewer than all where they share
    cores. Some may wait meanwhile.
    """
    if not cluster.slowdown:
        return cluster.num_devices
    size = cluster.levels[0].size
    of_a_host = max(n / slowdown_of(cluster.slowdown, n) for n in range(1, size + 1))
    return of_a_host * cluster.num_devices / size
