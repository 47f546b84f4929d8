"""A workload as it is trained here: operators, updates and the reading of batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from anabranch.graph.capture import Captured, capture
from anabranch.profile.measure import measure
from anabranch.profile.profile import Profile
from anabranch.runtime.measurement.reading import measure_reading
from anabranch.runtime.measurement.update import measure_update
from anabranch.workload import Workload


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
    if captured is None:
        captured = capture(workload.module, workload.example, per_sample=workload.per_sample)
    return replace(
        measure(captured, samples, device=device, **options),
        update=measure_update(workload, device=device),
        read_sample_s=measure_reading(workload, max(samples)),
    )
