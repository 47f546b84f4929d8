"""Synthetic batches with something to learn: for the papers' models, whose own data is not public.

Every batch is drawn from a seed of its own: ranks draw the same without talking, no epoch repeats.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from anabranch.workload import Batch

STEPS_PER_EPOCH = 64
EVAL_BATCHES = 8
_EVAL_EPOCH = -1

Draw = Callable[[int, torch.Generator], Batch]
"""(samples, source of chance) -> one batch."""


def seeded(*numbers: int) -> torch.Generator:
    """A generator that depends on every one of the numbers."""
    state = 0
    for number in numbers:
        # Knuth's 64-bit linear congruential generator spreads neighbouring numbers apart.
        state = (state * 6364136223846793005 + number + 1442695040888963407) % 2**63
    return torch.Generator().manual_seed(state)


def training_stream(draw: Draw, seed: int) -> Callable[[int, int], Iterator[Batch]]:
    """``Workload.data``: (batch size, epoch) -> batches."""

    def batches(batch_size: int, epoch: int) -> Iterator[Batch]:
        for step in range(STEPS_PER_EPOCH):
            yield draw(batch_size, seeded(seed, epoch, step))

    return batches


def held_out_stream(draw: Draw, seed: int) -> Callable[[int], Iterator[Batch]]:
    """``Workload.eval_data``: batches that no training epoch draws."""

    def batches(batch_size: int) -> Iterator[Batch]:
        for step in range(EVAL_BATCHES):
            yield draw(batch_size, seeded(seed, _EVAL_EPOCH, step))

    return batches


def prototypes(classes: int, width: int, seed: int) -> torch.Tensor:
    """One direction of unit variance per class; [classes, width]."""
    return torch.randn(classes, width, generator=seeded(seed, classes, width))
