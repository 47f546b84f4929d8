"""Seconds of a step that are neither compute of operators nor a link's.

    message     fixed + per byte, of the processors at both ends; the link's time is in
                ``communication``
    update      fixed + per tensor + per byte of a device's trainable parameters, as measured for
                the workload's optimizer; otherwise bytes moved / bandwidth of the memory, where
                weights and optimizer state are read and written and gradients read:

                    bytes moved = (3 + 2 * optimizer state per weight) * bytes of weights

    pass        fixed + per value that enters or leaves the stage, or gradient of one, besides its
                operators (``CostModel.pass_s``)
    sums        per gradient + per byte and other rank + per bucket a message to and from each of
                them, of the processors; the links' time is in ``communication``. Where ranks share
                the optimizer's state each byte is added up on one of them, and what that has
                updated goes to the others
    reading     of a batch, by its samples, as measured for the workload's data; a step alone is
                given its batch
    agreement   of loss and metrics: every rank sends its totals to all others and takes theirs

    slowdown    of devices that share processors and caches, by how many of them compute

What a cluster was not calibrated for costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from anabranch.cluster import Calibration, Cluster
from anabranch.profile.data_sheets import DATA_SHEETS
from anabranch.profile.profile import Profile, UpdateCost


def message_s(calibration: Calibration | None, nbytes: float) -> tuple[float, float]:
    """Processor seconds of a message at its sender and at its receiver; none for no bytes."""
    if calibration is None or not nbytes:
        return 0.0, 0.0
    return (
        calibration.send_s + calibration.send_byte_s * nbytes,
        calibration.receive_s + calibration.receive_byte_s * nbytes,
    )


def _to_others_s(calibration: Calibration, ranks: int) -> tuple[float, float]:
    """Processor seconds of a rank that sends a small message to each of the others, and of taking
    theirs.
    """
    send_s, receive_s = message_s(calibration, 1)
    others = ranks - 1
    return others * (send_s + calibration.value_s), others * (receive_s + calibration.value_s)


def sum_s(
    calibration: Calibration | None,
    tensors: int,
    nbytes: float,
    ranks: int,
    *,
    buckets: int = 1,
    shares: bool = False,
) -> float:
    """Processor seconds of a rank for the sums of so many gradients.

    Args:
        shares: whether the ranks share the optimizer's state, so that one of them adds a gradient.
    """
    if calibration is None or ranks < 2:
        return 0.0
    terms = (ranks - 1) / ranks if shares else ranks - 1
    seconds = calibration.sum_tensor_s * tensors + calibration.sum_byte_s * nbytes * terms
    return seconds + buckets * sum(_to_others_s(calibration, ranks))


def share_s(
    calibration: Calibration | None, tensors: int, nbytes: float, ranks: int, *, buckets: int = 1
) -> float:
    """Processor seconds of a rank that sends its part of so many parameters to all others, and
    takes theirs.
    """
    if calibration is None or ranks < 2:
        return 0.0
    moved = 2 * (ranks - 1) / ranks * nbytes
    seconds = calibration.share_tensor_s * tensors + calibration.share_byte_s * moved
    return seconds + buckets * sum(_to_others_s(calibration, ranks))


class Agreement(NamedTuple):
    """Processor seconds of a rank that sends its totals to all others, seconds on their way, and
    processor seconds of a rank that takes those of all others.
    """

    send_s: float = 0.0
    latency_s: float = 0.0
    receive_s: float = 0.0


NOTHING_TOLD = Agreement()


def agreement_of(cluster: Cluster, ranks: int) -> Agreement:
    """What it takes of so many ranks; nothing of a single one."""
    calibration = cluster.calibration
    if calibration is None or ranks < 2:
        return NOTHING_TOLD
    send_s, receive_s = _to_others_s(calibration, ranks)
    return Agreement(send_s, cluster.slowest_link((0, ranks - 1)).latency_s, receive_s)


def update_cost(profile: Profile, cluster: Cluster, optimizer_factor: float) -> UpdateCost:
    """What updates cost on a device: as measured, from the device's data sheet, or by the bandwidth
    that the cluster was calibrated with; nothing where none is known.
    """
    if profile.update is not None:
        return profile.update
    if profile.source == "estimated" and profile.device in DATA_SHEETS:
        bandwidth = DATA_SHEETS[profile.device].effective_bandwidth
    elif cluster.calibration is not None:
        bandwidth = cluster.calibration.memory_bandwidth
    else:
        return UpdateCost(0.0, 0.0, 0.0)
    return UpdateCost(0.0, 0.0, (3 + 2 * optimizer_factor) / bandwidth)


def slowdown_of(slowdown: Sequence[float] | NDArray[np.float64], jobs: int) -> float:
    """How many times as long so many jobs take; with more than there are entries, as many times
    longer than the last as they are more.
    """
    if jobs <= len(slowdown):
        return float(slowdown[jobs - 1])
    return float(slowdown[-1] * jobs / len(slowdown))


def computed_at_once(cluster: Cluster) -> float:
    """How many devices alone compute as much as all of the cluster do together at best, which may
    be while some of them wait.
    """
    if not cluster.slowdown:
        return cluster.num_devices
    size = cluster.levels[0].size
    of_a_host = max(n / slowdown_of(cluster.slowdown, n) for n in range(1, size + 1))
    return of_a_host * cluster.num_devices / size
