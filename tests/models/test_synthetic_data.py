"""Synthetic batches: reproducible, never the same twice, with something to learn."""

from __future__ import annotations

import torch

from anabranch.models.workload_builders import (
    SYNTHETIC,
    class_patterns,
    seeded,
    stream,
    under_noise,
)


def test_every_number_of_a_seed_counts() -> None:
    """Neighbouring seeds, and the same numbers in another order, give other draws."""
    seeds = [(0,), (1,), (0, 0), (0, 1), (1, 0)]
    draws = [torch.rand(1, generator=seeded(*seed)).item() for seed in seeds]
    assert len(set(draws)) == len(seeds)
    assert torch.rand(1, generator=seeded(0, 1)).item() == draws[3]


def test_no_batch_occurs_twice_in_training_or_evaluation() -> None:
    """Not in the next epoch, and not among the held-out batches."""
    draw = lambda samples, generator: torch.rand(samples, generator=generator)  # noqa: E731
    epoch = stream(draw, 0, 8)
    batches = [*epoch(1, 0), *epoch(1, 1), *epoch(1, SYNTHETIC.eval_epoch)]
    assert len({batch.item() for batch in batches}) == len(batches)


def test_a_pattern_under_noise_has_the_stated_strength() -> None:
    """The mean over many samples is the pattern times the signal, at every place of the shape."""
    pattern = torch.tensor([[1.0, -1.0]]).expand(20_000, 2)
    mean = under_noise(pattern, (3, 2), seeded(0)).mean(0)
    expected = SYNTHETIC.signal * torch.tensor([1.0, -1.0]).expand(3, 2)
    torch.testing.assert_close(mean, expected, atol=0.05, rtol=0)


def test_each_tower_shows_the_class() -> None:
    """Samples of one class are alike in every tower, apart from noise."""
    batch = class_patterns([(4, 64), (64,)], 2, seed=0)(200, seeded(1))
    for inputs in batch["inputs"]:
        flat = inputs.flatten(1)
        first, second = (flat[batch["target"] == c].mean(0) for c in (0, 1))
        # Noise alone would give less than half of that.
        assert (first - second).norm() > SYNTHETIC.signal * flat.shape[1] ** 0.5
