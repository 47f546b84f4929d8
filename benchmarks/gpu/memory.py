"""What happens where memory is short, what does a communicator take, and what does a stage that is
replayed as a graph gain?

Under pressure a step must end with an error that has numbers, or well; never hang.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist

import anabranch
from anabranch.verification import even_plan
from benchmarks.gpu import hang, subject
from benchmarks.gpu.case import Case, Row

LEFT = (2**30, 2**28, 2**26)
"""Bytes that are left free before a step."""

GROUPS = 4


def cases(device: str) -> list[Case]:
    """Those of two ranks over NCCL only on a GPU; a stage is replayed there alone as well."""
    shared = hang.shared_card() if device == "cuda" and torch.cuda.device_count() < 2 else {}
    pressure = [
        Case(f"pressure {left >> 20} MiB", ranks=2, limit_s=60.0, environment=shared)
        for left in LEFT
    ]
    return [
        *pressure,
        Case("communicators", ranks=2, limit_s=60.0, environment=shared),
        Case("replayed", limit_s=120.0),
    ]


def measure(case: str, device: torch.device) -> Iterator[Row]:
    """By the name of the case."""
    if device.type == "cuda":
        hang.pretend_two_hosts()
    kind, _, amount = case.partition(" ")
    if kind == "pressure":
        yield from _pressure(int(amount.split()[0]) << 20, device)
    elif kind == "communicators":
        yield from _communicators(device)
    else:
        yield from _replayed(device)


def _pipeline(ranks: int, device: torch.device, **options: object) -> anabranch.Pipeline:
    workload = subject.workload_on(device, device.type)
    captured = anabranch.capture(workload.module, workload.example)
    plan = even_plan(captured.graph, ranks, subject.BATCH)
    return anabranch.Pipeline(
        workload,
        plan,
        captured=captured,
        check_gradients=False,
        compute=anabranch.ComputeOptions(**options),  # type: ignore[arg-type]
        timeout=20.0,
    )


def _pressure(left: int, device: torch.device) -> Iterator[Row]:
    pipeline = _pipeline(2, device)
    data = subject.batches(pipeline.workload)
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        ranks_here = 2 if torch.cuda.device_count() < 2 else 1
        ballast = max((free - left) // ranks_here, 0)
        _kept.append(torch.empty(ballast, dtype=torch.uint8, device=device))
    begun = time.perf_counter()
    try:
        for batch in data:
            pipeline.step(batch)
        said = ""
    except Exception as error:
        said = f"{type(error).__name__}: {error}"[:600]
    yield {"left_bytes": left, "ended_after_s": time.perf_counter() - begun, "said": said}


_kept: list[torch.Tensor] = []


def _communicators(device: torch.device) -> Iterator[Row]:
    """Bytes of the device that groups of two ranks take, once they are used."""
    is_gpu = device.type == "cuda"
    dist.init_process_group("cpu:gloo,cuda:nccl" if is_gpu else "gloo")
    backend = "nccl" if is_gpu else "gloo"
    taken: list[int] = []
    for _ in range(1 + GROUPS):
        before = torch.cuda.mem_get_info(device)[0] if is_gpu else 0
        group = dist.new_group([0, 1], backend=backend, timeout=timedelta(seconds=30))
        element = torch.ones(1, device=device)
        dist.all_reduce(element, group=group)
        element.item()
        taken.append(before - torch.cuda.mem_get_info(device)[0] if is_gpu else 0)
    yield {"first_bytes": taken[0], "further_bytes": sum(taken[1:]) // GROUPS}


def _replayed(device: torch.device) -> Iterator[Row]:
    """Steps with stages that are replayed, and without."""
    losses = {}
    for backend in (False, "cudagraphs"):
        pipeline = _pipeline(1, device, compile=backend)
        data = subject.batches(pipeline.workload)
        losses[backend] = [pipeline.step(batch) for batch in data]
        step_s = subject.step_seconds(lambda p=pipeline, d=data: p.step(d[0]), device)
        yield {"compile": str(backend), "step_s": step_s}
    yield {"agrees": losses[False] == losses["cudagraphs"]}
