"""Synthetic inputs of several towers: a pattern along each input, to be found under noise."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from anabranch.models.synthetic_data import prototypes
from anabranch.workload import Batch

SIGNAL = 0.3
"""Standard deviation of the pattern against noise of 1: learned in dozens of steps, not in one."""


def under_noise(
    pattern: torch.Tensor, shape: tuple[int, ...], generator: torch.Generator
) -> torch.Tensor:
    """Normal noise of [samples, *shape] plus each sample's pattern, [samples, last of shape]."""
    samples = pattern.shape[0]
    signal = pattern.view(samples, *[1] * (len(shape) - 1), shape[-1])
    return torch.randn(samples, *shape, generator=generator).add_(signal, alpha=SIGNAL)


def class_patterns(
    shapes: Sequence[tuple[int, ...]], classes: int, seed: int
) -> Callable[[int, torch.Generator], Batch]:
    """Draws ``{"inputs": one tensor per tower, "target": class of each sample}``.

    Args:
        shapes: per tower, the shape of one sample; the pattern lies along the last dimension.
        classes: number of classes, drawn evenly.
        seed: of the patterns.
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
