"""Synthetic batches with something to learn, for the papers' models, whose own data is not public.

Every batch is drawn from a seed of its own: ranks draw the same without talking, no epoch repeats.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from anabranch.workload import Batch


@dataclass(frozen=True, slots=True)
class SyntheticData:
    """Sizes of data that is drawn.

    Attributes:
        steps_per_epoch: batches of an epoch.
        eval_batches: held-out batches.
        eval_epoch: epoch of the held-out batches, which training does not come to.
        signal: standard deviation of the pattern against noise of 1: learned in dozens of
            steps, not in one.
        example_samples: samples of a workload's example.
    """

    steps_per_epoch: int = 64
    eval_batches: int = 8
    eval_epoch: int = -1
    signal: float = 0.3
    example_samples: int = 2


SYNTHETIC = SyntheticData()


Draw = Callable[[int, torch.Generator], Batch]
"""(samples, source of chance) -> one batch."""


def seeded(*numbers: int) -> torch.Generator:
    """A generator that depends on every one of the numbers."""
    state = 0
    for number in numbers:
        # Knuth's 64-bit linear congruential generator spreads neighbouring numbers apart.
        state = (state * 6364136223846793005 + number + 1442695040888963407) % 2**63
    return torch.Generator().manual_seed(state)


def stream(draw: Draw, seed: int, batches: int) -> Callable[[int, int], Iterator[Batch]]:
    """``Workload.data``: (batch size, epoch) -> batches."""

    def epoch_batches(batch_size: int, epoch: int) -> Iterator[Batch]:
        for step in range(batches):
            yield draw(batch_size, seeded(seed, epoch, step))

    return epoch_batches


def prototypes(classes: int, width: int, seed: int) -> torch.Tensor:
    """One direction of unit variance per class; [classes, width]."""
    return torch.randn(classes, width, generator=seeded(seed, classes, width))


def under_noise(
    pattern: torch.Tensor, shape: tuple[int, ...], generator: torch.Generator
) -> torch.Tensor:
    """Normal noise of [samples, *shape] plus each sample's pattern, [samples, last of shape]."""
    samples = pattern.shape[0]
    signal = pattern.view(samples, *[1] * (len(shape) - 1), shape[-1])
    return torch.randn(samples, *shape, generator=generator).add_(signal, alpha=SYNTHETIC.signal)


def class_patterns(shapes: Sequence[tuple[int, ...]], classes: int, seed: int) -> Draw:
    """Draws ``{"inputs": one tensor per tower, "target": class of each sample}``.

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
