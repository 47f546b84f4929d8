"""How much of a step is the device busy, and what does the host do per action, on three models;
beside a plain loop over micro-batches?

The share is what kernels take, by PyTorch's profiler, of a step without it. The host's seconds are
those in which it gives the device its work, without what it waits for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_map

import anabranch
from anabranch.models import build
from anabranch.runtime.reference import call
from anabranch.runtime.worker import Worker
from anabranch.workload import Workload
from benchmarks.gpu.case import Case, Row
from benchmarks.gpu.subject import step_seconds
from benchmarks.runtime import ours

MODELS = {"transformer": 4, "mmt": 4, "dlrm": 32}
"""Model -> samples of a micro-batch."""

MICROBATCHES = 8


def cases(device: str) -> list[Case]:
    """One per model."""
    return [Case(model, limit_s=90.0) for model in MODELS]


def measure(case: str, device: torch.device) -> Iterator[Row]:
    """One row for the pipeline of one stage, one for the loop."""
    is_gpu = device.type == "cuda"
    size = MODELS[case] if is_gpu else 2
    workload = build(case, preset="published" if is_gpu else "small")
    workload.module.to(device)
    assert workload.data is not None
    batch = next(iter(workload.data(size * MICROBATCHES, 0)))
    loop = _loop(workload, batch, size, device)
    loop_s, loop_host_s, loop_busy_s = _measured(loop, loop, device)
    workload.module.zero_grad()
    captured = anabranch.capture(workload.module, workload.example)
    plan = ours.plan_of(
        captured, lambda _: 0, [[0]], microbatches=MICROBATCHES, microbatch_size=size
    )
    pipeline = anabranch.Pipeline(workload, plan, captured=captured, check_gradients=False)
    pipeline.step(batch)
    worker, leaves, _ = pipeline._steps.ran
    step_s, host_s, busy_s = _measured(
        lambda: pipeline.step(batch), lambda: _passes(worker, leaves), device
    )
    actions = len(worker.actions)
    yield {
        "side": "ours",
        "step_s": step_s,
        "busy_share": busy_s / step_s,
        "host_per_action_s": host_s / actions,
        "over_loop": step_s / loop_s,
    }
    yield {
        "side": "loop",
        "step_s": loop_s,
        "busy_share": loop_busy_s / loop_s,
        "host_per_action_s": loop_host_s / (2 * MICROBATCHES),
    }


def _passes(worker: Worker, leaves: dict[str, torch.Tensor]) -> None:
    worker.run(leaves, 0)


def _loop(
    workload: Workload, batch: anabranch.Batch, size: int, device: torch.device
) -> Callable[[], None]:
    """Forward and backward of the user's module for each micro-batch, and the optimizer."""
    optimizer = workload.make_optimizer(list(workload.module.named_parameters()))

    def loop() -> None:
        optimizer.zero_grad()
        there = tree_map(lambda leaf: leaf.to(device, non_blocking=True), batch)
        for start in range(0, size * MICROBATCHES, size):
            part = tree_map(lambda leaf, at=start: leaf[at : at + size], there)
            (call(workload.module, part)["loss"] / MICROBATCHES).backward()
        optimizer.step()

    return loop


def _measured(
    step: Callable[[], object], passes: Callable[[], object], device: torch.device
) -> tuple[float, float, float]:
    """Seconds of a step, of the host in its passes, and of kernels in a step."""
    step_s = step_seconds(step, device)
    is_gpu = device.type == "cuda"
    begun = time.perf_counter()
    passes()
    host_s = time.perf_counter() - begun
    kind = ProfilerActivity.CUDA if is_gpu else ProfilerActivity.CPU
    if is_gpu:
        torch.cuda.synchronize(device)
    with profile(activities=[kind]) as watched:
        step()
        if is_gpu:
            torch.cuda.synchronize(device)
    field = "self_device_time_total" if is_gpu else "self_cpu_time_total"
    busy_us = sum(getattr(event, field) for event in watched.key_averages())
    return step_s, host_s, busy_us / 1e6
