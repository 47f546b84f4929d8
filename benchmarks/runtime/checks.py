"""Seconds of the checks before the first step, for every built-in model.

Two micro-batches through a plan of one device and through the user's module, and the second call of
that, are what a step with checks takes longer than one without. Each is the first step of a
pipeline of its own, in turns, after a pair of first steps that warms the caches.
"""

from __future__ import annotations

import statistics
import time

from anabranch.graph.capture import Captured, capture
from anabranch.models import MODELS, build
from anabranch.runtime.pipeline import Pipeline
from anabranch.verification import even_plan
from anabranch.workload import Batch, Workload
from benchmarks.planners.common import Row, table

SAMPLES, REPEATS = 64, 3


def rows() -> list[Row]:
    """One row per model."""
    found = []
    for name in MODELS:
        workload = build(name, preset="small")
        assert workload.data is not None
        batch = next(iter(workload.data(SAMPLES, 0)))
        captured = capture(workload.module, workload.example)
        pairs = [
            [_first_step_s(workload, captured, batch, checked=checked) for checked in (True, False)]
            for _ in range(1 + REPEATS)
        ]
        checked, plain = (statistics.median(column) for column in zip(*pairs[1:], strict=True))
        found.append({"model": name, "first_step_s": plain, "checks_s": checked - plain})
    return found


def _first_step_s(workload: Workload, captured: Captured, batch: Batch, *, checked: bool) -> float:
    plan = even_plan(captured.graph, 1, SAMPLES)
    pipe = Pipeline(workload, plan, captured=captured, check_gradients=checked)
    start = time.perf_counter()
    pipe.step(batch)
    return time.perf_counter() - start


def show(found: list[Row]) -> str:
    """Seconds by model."""
    lines = [
        [row["model"], f"{row['first_step_s']:.3f}", f"{row['checks_s']:.3f}"] for row in found
    ]
    return table(["model", "first step s", "checks s"], lines)
