"""Measured seconds in which a rank reads a batch of the workload's data.

Every rank reads all batches, between steps. What a loader reads ahead in processes of its own is no
part of it, as in training.
"""

from __future__ import annotations

import statistics
import threading
import time
import warnings
from collections.abc import Iterable
from itertools import islice

import torch

from anabranch.workload import Batch, Workload

_BATCHES, _BUDGET_S = 8, 1.0

_PATIENCE_S = 20.0
"""Seconds that reading may take in all; a loader may need some of them to start. One that blocks
must not hold up a plan for ever.
"""


def measure_reading(workload: Workload, samples: int) -> float:
    """Seconds per sample, from batches of so many; 0 for a workload without data, and for data that
    takes too long, with a warning.

    The random state is left as it was. Data that raises is training's to report.
    """
    data = workload.data
    if data is None:
        return 0.0
    found: list[float] = []

    def read() -> None:
        try:
            found.append(reading_s(data(samples, 0)) / samples)
        except Exception:
            found.append(0.0)

    # What blocks can only be left behind; a daemon does not hold up the end of the process.
    reader = threading.Thread(target=read, name="anabranch reading", daemon=True)
    with torch.random.fork_rng([]):
        reader.start()
        reader.join(_PATIENCE_S)
    if not found:
        warnings.warn(
            f"the workload's data has not yielded {_BATCHES} batches within {_PATIENCE_S:g} s: "
            "predictions leave reading it out, and training would wait for it",
            stacklevel=2,
        )
    return found[0] if found else 0.0


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
