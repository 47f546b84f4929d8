"""The small transformer that is trained on a device, and beside it on the CPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from anabranch.models import build
from anabranch.workload import Batch, Workload
from benchmarks.gpu.case import Row

SIZES = {
    "cuda": {"sequence": "128", "hidden": "512", "feedforward": "2048", "vocabulary": "2048"},
    "cpu": {"layers": "2", "hidden": "32", "feedforward": "64"},
}
"""Device -> options of the built-in model's small preset; on the CPU it is only a rehearsal."""

BATCH, MICROBATCH, STEPS, TIMED = 8, 2, 3, 5
"""Samples, and steps that are compared and timed."""

BOUNDS = {"fp32": (1e-4, 1e-2), "bf16": (1e-3, 0.1), "fp16": (1e-3, 0.05)}
"""Precision -> largest errors of losses and of weights that are rounding."""


def workload_on(
    device: torch.device, size: str, *, dropout: float = 0.0, tied: bool = False
) -> Workload:
    """The model on a device, with the same weights each time.

    SGD, because an error of a weight is then as large as that of its gradients; Adam makes rounding
    of a tiny gradient as large as the others.
    """
    options = {**SIZES[size], "dropout": str(dropout), "tied": str(tied).lower()}
    workload = build("transformer", preset="small", options=options)
    workload.module.to(device)
    return replace(workload, optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9))


def batches(workload: Workload, count: int = STEPS) -> list[Batch]:
    """Of the first epoch, on the CPU, as a user's loader gives them."""
    assert workload.data is not None
    return [batch for batch, _ in zip(workload.data(BATCH, 0), range(count), strict=False)]


def trained_alone(workload: Workload, data: Sequence[Batch]) -> list[float]:
    """Train the module itself, without anything of ours, each batch in one piece."""
    module, losses = workload.module, []
    optimizer = workload.optimizer(list(module.named_parameters()))
    for batch in data:
        optimizer.zero_grad()
        loss = module(**batch)["loss"]
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def step_seconds(step: Callable[[], object], device: torch.device) -> float:
    """The median of some steps after two that warm up, each until the GPU has done it."""
    found = []
    for _ in range(2 + TIMED):
        begun = time.perf_counter()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.append(time.perf_counter() - begun)
    return statistics.median(found[2:])


def agreement(
    losses: Sequence[float],
    module: nn.Module,
    expected_losses: Sequence[float],
    expected: nn.Module,
    start: nn.Module,
    precision: str | None = None,
) -> Row:
    """How far losses and the weights that this rank has are from the expected ones.

    Errors of weights are relative to the largest change of a tensor since ``start``, which counts
    as a hundredth of the largest of all tensors at least: some gradients are rounding alone, such
    as that of an attention's key bias.
    """
    own = dict(module.named_parameters())
    changes = {
        name: (theirs.detach() - before.detach()).abs().max().item()
        for (name, theirs), before in zip(
            expected.named_parameters(), start.parameters(), strict=True
        )
    }
    floor = max(*changes.values(), 1e-12) / 100
    errors = [
        (own[name].detach().cpu() - theirs.detach()).abs().max().item() / max(changes[name], floor)
        for name, theirs in expected.named_parameters()
        if not own[name].is_meta and not own[name].isnan().any()  # otherwise another rank has it
    ]
    pairs = list(zip(losses, expected_losses, strict=True))
    loss_error = max(abs(ours - theirs) / abs(theirs) for ours, theirs in pairs)
    most_loss, most_weight = BOUNDS[precision or "fp32"]
    return {
        "agrees": loss_error <= most_loss and max(errors) <= most_weight,
        "loss_error": loss_error,
        "weight_error": max(errors),
        "parameters": len(errors),
        "losses": list(losses),
    }
