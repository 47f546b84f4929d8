"""Numbers by seed, step, operation, sample and place."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from anabranch.runtime.numerics.random_streams import RandomSite, counters, mix, step_key, streams

GOLDEN = 0x9E3779B97F4A7C15
MASK = 2**64 - 1

CPU = torch.device("cpu")


def scipy_stats() -> Any:
    """Loaded by those who ask: a second that no other worker needs."""
    from scipy import stats

    return stats


def place(
    shape: tuple[int, ...],
    *,
    seed: int = 0,
    step: int = 0,
    call: int = 0,
    start: int = 0,
    dim: int = 0,
) -> RandomSite:
    key, first = torch.tensor(step_key(seed, step)), torch.tensor(start)
    blocks = (math.prod(shape[:dim]), shape[dim], math.prod(shape[dim + 1 :]))
    return RandomSite(streams(key, first, counters([call], CPU), shape[dim]), 0, blocks, shape)


def test_finaliser_is_splitmix64() -> None:
    """The generator that starts at 0 gives this first (as in Java's SplittableRandom)."""
    assert mix(GOLDEN) == 0xE220A8397B1DCDAF
    assert mix(2 * GOLDEN & MASK) == 0x6E789E6AA1B965F4


def test_hashes_are_those_of_whole_numbers() -> None:
    """The same by Python's integers: key, operation 7, sample 5, numbers 1, 2, 3."""
    key = step_key(11, 3) & MASK
    own = mix((key + 8 * GOLDEN) & MASK)
    sample = mix((own + 6 * GOLDEN) & MASK)
    expected = [mix((sample + i * GOLDEN) & MASK) for i in (1, 2, 3)]
    found = place((4, 3), seed=11, step=3, call=7, start=2).hashes(3)[3]
    assert [number & MASK for number in found.tolist()] == expected


def test_a_sample_draws_the_same_wherever_it_is() -> None:
    """In a batch of 8, in a part of it, alone; in dimension 0 or 1."""
    whole = place((8, 5)).uniform(torch.float32)
    assert torch.equal(place((3, 5), start=4).uniform(torch.float32), whole[4:7])
    assert torch.equal(place((1, 5), start=7).uniform(torch.float32), whole[7:])
    across = place((5, 8), dim=1).uniform(torch.float32)
    assert torch.equal(across.T, whole)


def uncorrelated(a: Tensor, b: Tensor) -> bool:
    """Within five standard errors of no correlation."""
    return abs(float(torch.corrcoef(torch.stack([a, b]))[0, 1])) < 5 / math.sqrt(len(a))


@pytest.mark.parametrize("change", ["seed", "step", "call", "start"])
def test_streams_are_independent(change: str) -> None:
    """Neighbouring seeds, steps, operations and samples have nothing in common, and neither have
    numbers that follow each other.
    """
    size = 100_000
    base = place((1, size)).uniform(torch.float64)[0]
    for value in (1, 2, 1000):
        other = place((1, size), **{change: value}).uniform(torch.float64)[0]
        assert uncorrelated(base, other)
        assert uncorrelated(base[1:], other[:-1])
    assert uncorrelated(base[1:], base[:-1])


def test_samples_are_uniform_together() -> None:
    """The first number of each of many samples, and all numbers of few samples."""
    for shape in ((50_000, 1), (3, 20_000)):
        numbers = place(shape).uniform(torch.float64).flatten().numpy()
        assert scipy_stats().kstest(numbers, "uniform").pvalue > 1e-3


def test_normal_numbers_are_normal() -> None:
    numbers = place((10, 10_000)).normal(torch.float64).flatten().numpy()
    assert scipy_stats().kstest(numbers, "norm").pvalue > 1e-3


@pytest.mark.parametrize("probability", [0.01, 0.1, 0.5, 0.9])
def test_share_of_kept(probability: float) -> None:
    """Within five standard errors, overall and for even and odd places, which are halves of one
    hash.
    """
    kept = place((20, 10_000)).kept(probability).double()
    error = 5 * math.sqrt(probability * (1 - probability) / (kept.numel() / 2))
    for part in (kept[:, ::2], kept[:, 1::2]):
        assert abs(float(part.mean()) - probability) < error
    assert uncorrelated(kept[:, ::2].flatten(), kept[:, 1::2].flatten())


def test_kept_at_the_ends() -> None:
    """Never and always, also where only rounding makes it so."""
    for nearly in (0.0, 1e-12):
        assert not place((2, 9)).kept(nearly).any()
        assert place((2, 9)).kept(1.0 - nearly).all()


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str
)
def test_uniform_numbers_stay_below_one(dtype: torch.dtype) -> None:
    """Also where rounding would reach it."""
    numbers = place((1, 200_000)).uniform(dtype)
    assert numbers.dtype == dtype
    assert numbers.min() >= 0
    assert numbers.max() < 1


def test_integers_cover_their_range() -> None:
    numbers = place((4, 5000)).integer(-2, 3, torch.int64)
    assert numbers.unique().tolist() == [-2, -1, 0, 1, 2]
    counts = torch.bincount(numbers.flatten() + 2).numpy()
    assert scipy_stats().chisquare(counts).pvalue > 1e-3


def test_a_value_without_samples_draws_one_thing_in_all_microbatches() -> None:
    key = torch.tensor(step_key(0, 0))
    first, second = (
        RandomSite(
            streams(key, torch.tensor(start), counters([3], CPU), 4), 0, (1, 0, 6), (2, 3)
        ).kept(0.5)
        for start in (0, 4)
    )
    assert torch.equal(first, second)
