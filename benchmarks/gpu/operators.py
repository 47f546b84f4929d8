"""Measured operators of the built-in models: their sum against the data sheet's estimate, and
against whole steps on the same GPU.

A whole step launches the same kernels from one loop: where it takes less than the sum of its
operators, these were measured launch by launch rather than kernel by kernel.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.utils._pytree import tree_map

import anabranch
from anabranch.graph.capture import Captured
from anabranch.models import build
from anabranch.profile.data_sheets import DATA_SHEETS
from anabranch.runtime.reference import call
from anabranch.workload import Workload
from benchmarks.gpu.case import Case, Row
from benchmarks.gpu.subject import step_seconds
from benchmarks.runtime import ours

SAMPLES = {
    "two-branch": (4, 32),
    "candle-uno": (128, 1024),
    "dlrm": (32, 128),
    "mmt": (4, 16),
    "transformer": (4, 16),
}
"""Model -> sizes of a micro-batch as plans have them."""


def cases(device: str) -> list[Case]:
    """One per model."""
    return [Case(model, limit_s=75.0) for model in SAMPLES]


def sheet_of(device: torch.device) -> str | None:
    """The data sheet of a card."""
    if device.type != "cuda":
        return None
    card = torch.cuda.get_device_name(device).lower()
    return next((name for name in DATA_SHEETS if name in card), None)


def measure(case: str, device: torch.device) -> Iterator[Row]:
    """One row per number of samples."""
    preset, counts = ("published", SAMPLES[case]) if device.type == "cuda" else ("small", (2, 4))
    workload = build(case, preset=preset)
    workload.module.to(device)
    captured = anabranch.capture(workload.module, workload.example)
    measured = anabranch.measure(captured, counts, device=device.type, repeats=5, budget_s=15.0)
    sheet = sheet_of(device) or "h100"
    estimated = anabranch.estimate(captured, sheet, measured.samples)
    for i, samples in enumerate(measured.samples):
        sums = [
            sum(cost.forward_s[i] + cost.backward_s[i] for cost in profile.costs)
            for profile in (measured, estimated)
        ]
        module_s, pipeline_s = _whole_steps(workload, captured, samples, device)
        yield {
            "model": case,
            "samples": samples,
            "operators": len(captured.graph),
            "operators_s": sums[0],
            f"estimated_{sheet}_s": sums[1],
            "module_step_s": module_s,
            "pipeline_step_s": pipeline_s,
            "operators_over_estimate": sums[0] / sums[1],
            "operators_over_module": sums[0] / module_s,
            "operators_over_pipeline": sums[0] / pipeline_s,
        }


def _whole_steps(
    workload: Workload, captured: Captured, samples: int, device: torch.device
) -> tuple[float, float]:
    """Seconds of forward and backward of the module, and of a step of a pipeline of one stage."""
    assert workload.data is not None
    batch = next(iter(workload.data(samples, 0)))
    there = tree_map(lambda leaf: leaf.to(device), batch)

    def step() -> None:
        call(workload.module, there)["loss"].backward()

    module_s = step_seconds(step, device)
    workload.module.zero_grad()
    plan = ours.plan_of(captured, lambda _: 0, [[0]], microbatches=1, microbatch_size=samples)
    one_stage = ours.our_side(captured, workload.example, plan, batch)()
    return module_s, step_seconds(one_stage, device)
