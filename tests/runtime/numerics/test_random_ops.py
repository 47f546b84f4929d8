"""Numbers by seed, step, operation, sample and place, and random operations made of them."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from anabranch.runtime.numerics.random_ops import RandomSite, counters, mix, step_key, streams
from tests.runtime.numerics.by_sample import rewritten

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


# Operations

WIDTH, LENGTH = 8, 6


def value(
    function: Callable[[Tensor], Tensor], x: Tensor, *, step: int = 0, start: int = 0
) -> Tensor:
    """What the function makes of x, at a step and from a sample on."""
    seen: list[Tensor] = []

    def look(h: Tensor) -> Tensor:
        return torch.sin(function(h))

    module = rewritten(look, len(x), tuple(x.shape[1:]))

    class Watch(torch.fx.Interpreter):
        def run_node(self, node: torch.fx.Node) -> object:
            if node.target is torch.ops.aten.sin.default:
                seen.append(self.env[node.args[0]])  # type: ignore[index]
            return super().run_node(node)

    Watch(module).run(torch.tensor(step_key(0, step)), torch.tensor(start), x)  # type: ignore[arg-type]
    return seen[0].detach()


def test_dropout_keeps_its_share_and_its_mean() -> None:
    """Each sample on its own mask; kept elements are divided by the share."""
    out = value(lambda x: F.dropout(x, 0.25), torch.ones(4, 50_000))
    assert set(out.unique().tolist()) == {0.0, torch.tensor(1 / 0.75).item()}
    torch.testing.assert_close(out.mean(1), torch.ones(4), rtol=0, atol=0.02)
    assert not torch.equal(out[0], out[1])


def test_feature_dropout_drops_whole_features() -> None:
    """All of a sample's channel, or nothing of it."""
    out = value(lambda x: F.dropout2d(x, 0.5), torch.ones(4, 500, 3, 3))
    assert set(out.sum((2, 3)).unique().tolist()) == {0.0, 18.0}
    torch.testing.assert_close(out.mean(), torch.tensor(1.0), rtol=0, atol=0.15)


@pytest.mark.parametrize("function", [F.alpha_dropout, F.feature_alpha_dropout])
def test_alpha_dropout_keeps_mean_and_variance(function: Callable[..., Tensor]) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 50_000)
    out = value(lambda h: function(h, 0.3, training=True), x)
    torch.testing.assert_close(out.mean(), torch.tensor(0.0), rtol=0, atol=0.03)
    torch.testing.assert_close(out.var(), torch.tensor(1.0), rtol=0, atol=0.05)


def test_dropout_of_everything() -> None:
    """Probability 1 gives zeros, with gradients of zero."""
    module = rewritten(lambda x: F.dropout(x, 1.0), 4, (3,))
    (loss,) = module(torch.tensor(1), torch.tensor(0), torch.ones(4, 3))
    loss.backward()
    assert loss == 0
    assert module.weight.grad == 0  # type: ignore[attr-defined]


def test_attention_without_dropped_weights_is_attention() -> None:
    """With a probability so small that nothing is dropped: causal, masked, scaled, grouped."""
    torch.manual_seed(0)
    x = torch.randn(4, 4, LENGTH, WIDTH)
    mask = torch.rand(LENGTH, LENGTH) > 0.3
    mask.fill_diagonal_(True)
    for options in (
        {"is_causal": True},
        {"attn_mask": mask},
        {"attn_mask": torch.randn(LENGTH, LENGTH), "scale": 0.7},
        {"enable_gqa": True},
    ):

        def attend(h: Tensor, p: float, options: dict[str, object] = options) -> Tensor:
            other = h[:, :2] if "enable_gqa" in options else h
            return F.scaled_dot_product_attention(
                h,
                other,
                other,
                dropout_p=p,
                **options,  # type: ignore[arg-type]
            )

        found = value(lambda h, attend=attend: attend(h, 1e-12), x)  # type: ignore[misc]
        torch.testing.assert_close(found, attend(x, 0.0))


def test_attention_drops_weights() -> None:
    """Values of ones: each row is the sum of what is kept, 1 in the mean."""
    x = torch.ones(4, 2, 40, 3)
    out = value(lambda h: F.scaled_dot_product_attention(h, h, h, dropout_p=0.5), x)
    torch.testing.assert_close(out.mean(), torch.tensor(1.0), rtol=0, atol=0.05)
    assert len(out[..., 0].unique()) > 10
    torch.testing.assert_close(out[..., 0] * 20, (out[..., 0] * 20).round())


def test_bernoulli_follows_its_probabilities() -> None:
    x = torch.full((4, 20_000), 0.2)
    torch.testing.assert_close(
        value(torch.bernoulli, x).mean(), torch.tensor(0.2), rtol=0, atol=0.01
    )
