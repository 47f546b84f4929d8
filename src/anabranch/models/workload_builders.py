"""Workloads of the built-in models: parameters from a seed (on meta for planning), data, AdamW.

The papers' models have synthetic batches with something to learn, as their own data is not public.
Every batch is drawn from a seed of its own: ranks draw equal batches by themselves, and no epoch
repeats another.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from anabranch.workload import Batch, NamedParameters, Workload, to_meta


@dataclass(frozen=True, slots=True)
class SyntheticData:
    """Sizes of random data.

    Attributes:
        steps_per_epoch: batches of an epoch.
        eval_batches: held-out batches.
        eval_epoch: epoch of the held-out batches, which training never reaches.
        signal: standard deviation of the pattern under noise of 1; it takes dozens of steps to
            learn, not one.
        example_samples: samples of a workload's example.
    """

    steps_per_epoch: int = 64
    eval_batches: int = 8
    eval_epoch: int = -1
    signal: float = 0.3
    example_samples: int = 2


SYNTHETIC = SyntheticData()


Draw = Callable[[int, torch.Generator], Batch]
"""(samples, source of random numbers) -> one batch."""


def seeded_generator(*numbers: int) -> torch.Generator:
    """Return a generator whose seed depends on each of the numbers."""
    state = 0
    for number in numbers:
        # Knuth's 64-bit linear congruential generator spreads neighbouring numbers apart.
        state = (state * 6364136223846793005 + number + 1442695040888963407) % 2**63
    return torch.Generator().manual_seed(state)


def stream(draw: Draw, seed: int, batches: int) -> Callable[[int, int], Iterator[Batch]]:
    """Return a function for ``Workload.data``: (batch size, epoch) -> batches."""

    def epoch_batches(batch_size: int, epoch: int) -> Iterator[Batch]:
        for step in range(batches):
            yield draw(batch_size, seeded_generator(seed, epoch, step))

    return epoch_batches


def prototypes(classes: int, width: int, seed: int) -> torch.Tensor:
    """Return a direction of unit variance per class; [classes, width]."""
    return torch.randn(classes, width, generator=seeded_generator(seed, classes, width))


def under_noise(
    pattern: torch.Tensor, shape: tuple[int, ...], generator: torch.Generator
) -> torch.Tensor:
    """Return noise of [samples, *shape] plus each sample's pattern, [samples, last of shape]."""
    samples = pattern.shape[0]
    signal = pattern.view(samples, *[1] * (len(shape) - 1), shape[-1])
    return torch.randn(samples, *shape, generator=generator).add_(signal, alpha=SYNTHETIC.signal)


def class_patterns(shapes: Sequence[tuple[int, ...]], classes: int, seed: int) -> Draw:
    """Draw ``{"inputs": one tensor per tower, "target": class of each sample}``.

    Args:
        shapes: per tower, the shape of one sample; the pattern lies along the last dimension.
    """
    patterns = [prototypes(classes, shape[-1], seed + i) for i, shape in enumerate(shapes)]

    def draw(samples: int, generator: torch.Generator) -> Batch:
        target = torch.randint(classes, (samples,), generator=generator)
        inputs = [
            under_noise(pattern[target], shape, generator)
            for shape, pattern in zip(shapes, patterns, strict=True)
        ]
        return {"inputs": inputs, "target": target}

    return draw


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
    """Return a workload on batches of ``draw``; wide models (``width``) have lower learning rates.

    Args:
        meta: build on the meta device, without memory or values.
        chance: metric -> its value for guessing.
    """
    example = draw(SYNTHETIC.example_samples, seeded_generator(sizes.seed))
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
    """Return a workload of branches whose sequences show the class's pattern under noise."""
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
    """Return a workload on a data set in memory; the learning rate rises, then falls.

    Args:
        gather: rows of the data set -> their batch.
        epoch_rows: source of random numbers -> training rows of one epoch in their order.
        held_out: rows to evaluate on.
        sizes: with ``learning_rate``, and ``steps`` until it has fallen.
        example: rows of the example.
        meta: build on the meta device, without memory or values.
        chance: metric -> its value for guessing.
    """

    def data(batch_size: int, epoch: int) -> Iterator[Batch]:
        return whole_batches(gather, epoch_rows(seeded_generator(sizes.seed, epoch)), batch_size)

    batch = gather(example[: SYNTHETIC.example_samples])
    return Workload(
        module=_initialised(make, sizes.seed, meta=meta),
        example=to_meta(batch) if meta else batch,
        data=data,
        eval_data=lambda batch_size: map(gather, torch.split(held_out, batch_size)),
        optimizer=partial(_adam, learning_rate=sizes.learning_rate),
        scheduler=partial(warm_up_then_cosine, steps=sizes.steps),
        chance=chance,
        name=name,
    )


def _initialised(make: Callable[[], nn.Module], seed: int, *, meta: bool) -> nn.Module:
    """Make the module, the same on every rank; leave the caller's random state alone."""
    with torch.random.fork_rng(devices=[]), torch.device("meta" if meta else "cpu"):
        torch.manual_seed(seed)
        return make()


def _adam(parameters: NamedParameters, learning_rate: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=learning_rate, weight_decay=0.0, fused=True)


def warm_up_then_cosine(
    optimizer: torch.optim.Optimizer, steps: int
) -> torch.optim.lr_scheduler.LRScheduler:
    """Raise the learning rate for 50 steps (at most a tenth), then lower it to 1 % at ``steps``."""
    rising = min(50, max(1, steps // 10))

    def share(step: int) -> float:
        decay = 0.5 * (1 + math.cos(math.pi * min(1.0, step / steps)))
        return min(1.0, (step + 1) / rising) * max(0.01, decay)

    return torch.optim.lr_scheduler.LambdaLR(optimizer, share)


def shuffled(rows: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return rows[torch.randperm(len(rows), generator=generator)]


def whole_batches(gather: Gather, rows: torch.Tensor, batch_size: int) -> Iterator[Batch]:
    """Generate batches of rows without a short last one; too few rows for any make one batch."""
    if len(rows) >= batch_size:
        rows = rows[: len(rows) // batch_size * batch_size]
    return map(gather, torch.split(rows, batch_size))
