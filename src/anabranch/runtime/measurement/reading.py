"""Measured seconds in which a rank reads a batch of the workload's data.

Every rank reads all batches, between steps. What a loader reads ahead in processes of its own is no
part of it, as in training.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable
from itertools import islice

import torch

from anabranch.workload import Batch, Workload

_BATCHES, _BUDGET_S = 8, 1.0


def measure_reading(workload: Workload, samples: int) -> float:
    """Seconds per sample, from batches of so many; 0 for a workload without data.

    The random state is left as it was. Data that raises is training's to report.
    """
    if workload.data is None:
        return 0.0
    with torch.random.fork_rng([]):
        try:
            return reading_s(workload.data(samples, 0)) / samples
        except Exception:
            return 0.0


def reading_s(batches: Iterable[Batch]) -> float:
    """The median of some batches behind the first, with which a loader starts."""
    taken: list[float] = []
    begun = start = time.perf_counter()
    for _ in islice(batches, _BATCHES):
        now = time.perf_counter()
        taken.append(now - begun)
        if now - start > _BUDGET_S:
            break
        begun = time.perf_counter()
    return statistics.median(taken[1:] or taken or [0.0])
