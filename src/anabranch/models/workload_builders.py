"""Workloads of the built-in models: parameters from a seed (or none, for planning), data, AdamW."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from anabranch.models.synthetic_data import SYNTHETIC, Draw, class_patterns, seeded, stream
from anabranch.workload import Batch, NamedParameters, Workload, to_meta

Gather = Callable[[torch.Tensor], Batch]
"""Sample numbers -> the batch of these samples."""


def synthetic_workload(
    name: str,
    make: Callable[[], nn.Module],
    draw: Draw,
    sizes: Any,
    *,
    meta: bool,
    width: int,
    chance: dict[str, float],
) -> Workload:
    """A workload on batches that ``draw`` makes up; wide models (``width``) learn more slowly.

    Args:
        meta: on the meta device, without memory or values.
        chance: metric -> what guessing would give.
    """
    example = draw(SYNTHETIC.example_samples, seeded(sizes.seed))
    held_out = stream(draw, sizes.seed, SYNTHETIC.eval_batches)
    return Workload(
        module=_initialised(make, sizes.seed, meta=meta),
        example=to_meta(example) if meta else example,
        data=stream(draw, sizes.seed, SYNTHETIC.steps_per_epoch),
        eval_data=lambda samples: held_out(samples, SYNTHETIC.eval_epoch),
        optimizer=partial(_adam, learning_rate=1e-3 if width < 512 else 1e-4),
        chance=chance,
        name=name,
    )


def branches_workload(
    name: str, make: Callable[[], nn.Module], sizes: Any, *, meta: bool
) -> Workload:
    """A workload of branches over sequences: each class is a pattern that all branches show under
    noise.
    """
    shapes = [(sizes.sequence, sizes.hidden)] * sizes.branches
    return synthetic_workload(
        name,
        make,
        class_patterns(shapes, sizes.classes, sizes.seed),
        sizes,
        meta=meta,
        width=sizes.hidden,
        chance={"accuracy": 1 / sizes.classes},
    )


def dataset_workload(
    name: str,
    make: Callable[[], nn.Module],
    gather: Gather,
    epoch_rows: Callable[[torch.Generator], torch.Tensor],
    held_out: torch.Tensor,
    sizes: Any,
    *,
    example: torch.Tensor,
    meta: bool,
    chance: dict[str, float],
) -> Workload:
    """A workload on a data set in memory; the learning rate rises, then falls (``sizes.steps``).

    Args:
        gather: rows of the data set -> their batch.
        epoch_rows: source of chance -> the training rows of one epoch in their order.
        held_out: rows to evaluate on.
        meta: on the meta device, without memory or values.
        chance: metric -> what guessing would give.
    """

    def data(batch_size: int, epoch: int) -> Iterator[Batch]:
        return whole_batches(gather, epoch_rows(seeded(sizes.seed, epoch)), batch_size)

    batch = gather(example[: SYNTHETIC.example_samples])
    return Workload(
        module=_initialised(make, sizes.seed, meta=meta),
        example=to_meta(batch) if meta else batch,
        data=data,
        eval_data=lambda batch_size: batches(gather, held_out, batch_size),
        optimizer=partial(_adam, learning_rate=sizes.learning_rate),
        scheduler=partial(warm_up_then_cosine, steps=sizes.steps),
        chance=chance,
        name=name,
    )


def _initialised(make: Callable[[], nn.Module], seed: int, *, meta: bool) -> nn.Module:
    """The module, the same on every rank; the caller's random state is left alone."""
    with torch.random.fork_rng(devices=[]), torch.device("meta" if meta else "cpu"):
        torch.manual_seed(seed)
        return make()


def _adam(parameters: NamedParameters, learning_rate: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=learning_rate, weight_decay=0.0, fused=True)


def warm_up_then_cosine(
    optimizer: torch.optim.Optimizer, steps: int
) -> torch.optim.lr_scheduler.LRScheduler:
    """The learning rate rises for 50 steps (at most a tenth), then falls to 1 % at ``steps``."""
    rising = min(50, max(1, steps // 10))

    def share(step: int) -> float:
        decay = 0.5 * (1 + math.cos(math.pi * min(1.0, step / steps)))
        return min(1.0, (step + 1) / rising) * max(0.01, decay)

    return torch.optim.lr_scheduler.LambdaLR(optimizer, share)


def shuffled(rows: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """The rows in random order."""
    return rows[torch.randperm(len(rows), generator=generator)]


def batches(gather: Gather, rows: torch.Tensor, batch_size: int) -> Iterator[Batch]:
    """Every row once; the last batch may be shorter."""
    for start in range(0, len(rows), batch_size):
        yield gather(rows[start : start + batch_size])


def whole_batches(gather: Gather, rows: torch.Tensor, batch_size: int) -> Iterator[Batch]:
    """Leave out the short last batch; fewer rows than one batch are one batch nevertheless."""
    if len(rows) >= batch_size:
        rows = rows[: len(rows) // batch_size * batch_size]
    return batches(gather, rows, batch_size)
