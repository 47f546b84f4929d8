"""What every built-in model does to become a workload: values from a seed, or none for planning."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from anabranch.models.synthetic_data import Draw, held_out_stream, seeded, training_stream
from anabranch.workload import NamedParameters, Workload, to_meta

EXAMPLE_SAMPLES = 2


def initialised(make: Callable[[], nn.Module], seed: int, *, meta: bool) -> nn.Module:
    """The module, the same on every rank; the caller's random state is left alone.

    Args:
        make: calls the module's class.
        seed: of the parameters.
        meta: on the meta device, without memory or values.
    """
    with torch.random.fork_rng(devices=[]), torch.device("meta" if meta else "cpu"):
        torch.manual_seed(seed)
        return make()


def adam(parameters: NamedParameters, learning_rate: float) -> torch.optim.Optimizer:
    """AdamW without weight decay."""
    return torch.optim.AdamW(parameters, lr=learning_rate, weight_decay=0.0, fused=True)


def synthetic(
    name: str,
    make: Callable[[], nn.Module],
    draw: Draw,
    *,
    seed: int,
    meta: bool,
    learning_rate: float,
    chance: dict[str, float],
) -> Workload:
    """A workload on batches that ``draw`` makes up."""
    example = draw(EXAMPLE_SAMPLES, seeded(seed))
    return Workload(
        module=initialised(make, seed, meta=meta),
        example=to_meta(example) if meta else example,
        data=training_stream(draw, seed),
        eval_data=held_out_stream(draw, seed),
        optimizer=partial(adam, learning_rate=learning_rate),
        chance=chance,
        name=name,
    )


def warm_up_then_cosine(
    optimizer: torch.optim.Optimizer, steps: int
) -> torch.optim.lr_scheduler.LRScheduler:
    """The learning rate rises for 50 steps (at most a tenth), then falls to 1 % at ``steps``."""
    rising = min(50, max(1, steps // 10))

    def share(step: int) -> float:
        decay = 0.5 * (1 + math.cos(math.pi * min(1.0, step / steps)))
        return min(1.0, (step + 1) / rising) * max(0.01, decay)

    return torch.optim.lr_scheduler.LambdaLR(optimizer, share)
