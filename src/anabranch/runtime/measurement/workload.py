"""A workload as it is trained here: operators, updates and the reading of batches.

Every rank reads all batches, between steps. What a loader reads ahead in processes of its own is no
part of the seconds that reading takes, as in training.
"""

from __future__ import annotations

import statistics
import threading
import time
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch

from anabranch.graph.capture import Captured, capture_workload
from anabranch.profile.measure import measure
from anabranch.profile.profile import Profile
from anabranch.runtime.measurement.update import measure_update
from anabranch.workload import Batch, Workload


@dataclass(frozen=True, slots=True)
class ReadingSizes:
    """Sizes of a measurement of reading.

    Attributes:
        batches: batches that are read.
        budget_s: seconds after which fewer do.
        patience_s: seconds that reading may take in all; a loader may need some of them to start.
            One that blocks must not hold up a plan for ever.
    """

    batches: int = 8
    budget_s: float = 1.0
    patience_s: float = 20.0


READING = ReadingSizes()


def measure_workload(
    workload: Workload,
    samples: Sequence[int] = (1, 2, 4, 8, 16),
    *,
    captured: Captured | None = None,
    device: str = "cpu",
    **options: Any,
) -> Profile:
    """Measure all that a step of a workload takes of a rank besides messages: the operators, as
    ``measure`` does, updates by its own optimizer, and the reading of its data.

    Args:
        captured: the captured module, where the caller has it; captured anew otherwise.
        samples: as for ``measure``, as are ``device`` and the other options; batches are read of
            the largest.

    Raises:
        CaptureError: if the module cannot be captured; for the rest see ``measure``.
    """
    captured = captured or capture_workload(workload)
    return replace(
        measure(captured, samples, device=device, **options),
        update=measure_update(workload, device=device),
        read_sample_s=measure_reading(workload, max(samples)),
    )


def measure_reading(workload: Workload, samples: int) -> float:
    """Seconds per sample, from batches of so many; 0 for a workload without data, and for data that
    takes too long, with a warning.

    The random state is left as it was. Data that raises is training's to report.
    """
    data = workload.data
    if data is None:
        return 0.0
    seconds: list[float] = []

    def read() -> None:
        try:
            seconds.append(reading_s(data(samples, 0)) / samples)
        except Exception:
            seconds.append(0.0)

    # What blocks can only be left behind; a daemon does not hold up the end of the process.
    reader = threading.Thread(target=read, name="anabranch reading", daemon=True)
    with torch.random.fork_rng([]):
        reader.start()
        reader.join(READING.patience_s)
    if not seconds:
        warnings.warn(
            f"the workload's data has not yielded {READING.batches} batches within "
            f"{READING.patience_s:g} s: predictions leave reading it out, and training would wait "
            "for it",
            stacklevel=2,
        )
    return seconds[0] if seconds else 0.0


def reading_s(batches: Iterable[Batch]) -> float:
    """The median of some batches behind the first, with which a loader starts."""
    taken: list[float] = []
    begun = start = time.perf_counter()
    for _ in islice(batches, READING.batches):
        now = time.perf_counter()
        taken.append(now - begun)
        if now - start > READING.budget_s:
            break
        begun = time.perf_counter()
    return statistics.median(taken[1:] or taken or [0.0])
