"""Two ranks of ours beside ``torch.distributed.pipelining`` and DDP, with a GPU each over NCCL, or
on one GPU through the host, where PyTorch's pipelines cannot run.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial

import torch
import torch.distributed as dist

from anabranch.models import build
from anabranch.runtime.ranks import texts
from benchmarks.gpu.case import Case, Row
from benchmarks.runtime import ours
from benchmarks.runtime.race import Side, Step, medians, rank_times, slowest
from benchmarks.runtime.transformer import BATCH, SIZES, LossOnly, plans_by_hand, torch_sides

LARGE = {"sequence": "256", "hidden": "1024", "heads": "16", "feedforward": "4096"}
"""On a GPU: 100 million parameters in as many layers."""

SMALL = {"layers": "4", "sequence": "16", "hidden": "32", "feedforward": "64", "vocabulary": "64"}
"""In a rehearsal."""


DDP = "torch ddp"
PIPELINES = "needs a GPU per rank: Gloo sends no tensors of a GPU"


def cases(device: str) -> list[Case]:
    """All sides in turn, in one run."""
    return [Case("race", ranks=2, limit_s=180.0)]


def measure(case: str, device: torch.device) -> Iterator[Row]:
    """One row per side, of the rank that takes longer, from the first one."""
    has_own = device.type == "cuda" and torch.cuda.device_count() >= 2
    dist.init_process_group("cpu:gloo,cuda:nccl" if has_own else "gloo")
    host = dist.new_group(backend="gloo")
    options = SIZES | (LARGE if device.type == "cuda" else SMALL)
    workload = build("transformer", preset="small", options=options)
    assert workload.data is not None
    batch = next(iter(workload.data(BATCH, 0)))
    model = LossOnly(workload.module).to(device)
    example = workload.example
    captured = ours.captured_model(model, example)
    sides = {
        # Each has a model of its own, because a rank gives up what its plan has elsewhere.
        name: ours.our_side(
            ours.captured_model(copy.deepcopy(model), example), example, plan, batch
        )
        for name, plan in plans_by_hand(captured).items()
    }
    theirs = torch_sides(workload.module, batch["tokens"].to(device), batch["target"].to(device))
    left_out = [name for name in theirs if name != DDP and device.type == "cuda" and not has_own]
    sides |= {name: side for name, side in theirs.items() if name not in left_out}

    def meet() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        dist.barrier(group=host)

    waiting = {name: partial(_waiting, side, device) for name, side in sides.items()}
    times = texts.gather(rank_times(waiting, meet=meet))
    if dist.get_rank() > 0:
        return
    found = medians(slowest(times))
    for name, seconds in found.items():
        yield {"side": name, "step_s": seconds, "throughput_over_ddp": found[DDP] / seconds}
    for name in left_out:
        yield {"side": name, "left_out": PIPELINES}


def _waiting(side: Side, device: torch.device) -> Step:
    """The step of a side, and until the GPU has done it."""
    step = side()

    def whole() -> None:
        step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return whole
