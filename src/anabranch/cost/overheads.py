"""Seconds of a step that are neither compute of operators nor a link's.

::

    message      fixed, of the processors at both ends alike; none for no bytes
    pass         fixed, of each forward and backward besides its operators
    step         fixed, of each device
    all-reduce   per byte and other rank + messages per bucket, of the processors
    agreement    of loss and metrics: every rank sends its totals to all others and takes theirs
    update       fixed + per tensor + per byte of a device's trainable parameters, as measured for
                 the workload's optimizer; otherwise bytes moved / bandwidth of the memory, where
                 weights and optimizer state are read and written and gradients read:

                     bytes moved = (3 + 2 * optimizer state per weight) * bytes of weights

    reading      of a batch, by its samples, as measured for the workload's data
    slowdown     of devices that share processors and caches, by how many of them compute

The links' time for messages and all-reduces is in ``communication``. A cluster without a
calibration has none of these but updates and reading.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from anabranch.cluster import Calibration, Cluster, Machine
from anabranch.profile.data_sheets import DATA_SHEETS
from anabranch.profile.profile import Profile, UpdateCost

FREE = Calibration(
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
    """Processor seconds of a rank for the all-reduce of gradients.

    Args:
        shares: whether the ranks share the optimizer's state, so that one of them adds a gradient.
    """
    added = (ranks - 1) / (ranks if shares else 1)
    messages_s = all_gather_work_s(calibration, ranks, buckets=buckets)
    return calibration.all_reduce_byte_s * nbytes * added + messages_s


def all_gather_work_s(calibration: Calibration, ranks: int, *, buckets: int) -> float:
    """Processor seconds of a rank that sends the parameters it has updated to all others, and
    takes theirs: one message per bucket each way.
    """
    return 2 * (ranks - 1) * buckets * calibration.message_s


def agreement_s(cluster: Cluster, ranks: int) -> tuple[float, float]:
    """Processor seconds of a rank that sends its totals to all others, which it takes again for
    theirs, and the latency in between; nothing for a single rank.
    """
    if cluster.calibration is None or ranks < 2:
        return 0.0, 0.0
    device_s = (ranks - 1) * cluster.calibration.message_s
    return device_s, cluster.link(0, ranks - 1).latency_s


def update_cost(profile: Profile, cluster: Cluster, optimizer_factor: float) -> UpdateCost:
    """Price of updates on a device: as measured, from the device's data sheet, or by the bandwidth
    that the cluster was calibrated with; nothing where none is known.
    """
    if profile.update is not None:
        return profile.update
    if profile.source == "estimated" and profile.device in DATA_SHEETS:
        bandwidth = DATA_SHEETS[profile.device].effective_bandwidth
    else:
        bandwidth = (cluster.calibration or FREE).memory_bandwidth
    return UpdateCost(0.0, 0.0, (3 + 2 * optimizer_factor) / bandwidth)


def slowdown_of(slowdown: Sequence[float] | NDArray[np.float64], jobs: int) -> float:
    """Factor by which so many jobs take longer than one; with more than there are entries, the last
    one times as many as they are more.
    """
    if jobs <= len(slowdown):
        return float(slowdown[jobs - 1])
    return float(slowdown[-1] * jobs / len(slowdown))


def computed_at_once(cluster: Cluster) -> float:
    """Number of devices that alone compute as much as all together at best, which may
    be while some of them wait.
    """
    if not cluster.slowdown:
        return cluster.num_devices
    size = cluster.levels[0].size
    of_a_host = max(n / slowdown_of(cluster.slowdown, n) for n in range(1, size + 1))
    return of_a_host * cluster.num_devices / size
