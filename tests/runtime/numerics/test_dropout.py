"""Random operations by sample: the same under any plan."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from anabranch.errors import CaptureError
from anabranch.graph.capture import capture
from anabranch.graph.cutting.split import split
from anabranch.runtime.compute.options import ComputeOptions
from anabranch.runtime.compute.programs import is_random
from anabranch.runtime.numerics.dropout import BySample
from anabranch.workload import Workload
from tests.runtime.numerics.by_sample import rewritten
from tests.runtime.small import Built, plan
from tests.runtime.threads import run, step

WIDTH, LENGTH = 8, 6
BY_SAMPLE = ComputeOptions(dropout="sample")
Batch = dict[str, Tensor]


def batch(samples: int, seed: int = 1) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(samples, LENGTH, WIDTH, generator=generator, dtype=torch.float64),
        "label": torch.randint(0, 3, (samples,), generator=generator),
    }


class Attends(nn.Module):
    """Attention twice, once by the fused operation, once by a product with samples and heads in one
    dimension; dropout in several places.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.2, batch_first=True)
        self.second = nn.MultiheadAttention(WIDTH, 2, dropout=0.3)
        self.drop, self.head = nn.Dropout(0.4), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        h = self.first(x).transpose(0, 1)
        h = h + self.second(h, h, h)[0]
        return F.cross_entropy(self.head(self.drop(h).mean(0)), label)


class Draws(nn.Module):
    """Every other way to draw."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        h = F.alpha_dropout(self.first(x), 0.2, training=True)
        h = h + F.dropout(h, 0.3, training=True).masked_fill(torch.bernoulli(h.sigmoid()) > 0, 0.1)
        h = F.dropout1d(self.second(h), 0.3)
        h = h + torch.sub(*F.dropout(torch.cat([h, -h]), 0.3, training=True).chunk(2))
        h = h + 0.1 * torch.rand_like(h) + 0.1 * torch.randn_like(h)
        h = h + 0.1 * torch.rand(h.shape[0], LENGTH, WIDTH, dtype=h.dtype)
        h = h + 0.1 * torch.randn(h.shape[0], 1, WIDTH, dtype=h.dtype)
        h = F.feature_alpha_dropout(self.third(h), 0.2, training=True)
        h = F.rrelu(h, training=True) + 0.1 * torch.empty_like(h).uniform_(-1, 1)
        h = h * torch.empty_like(h).bernoulli_(0.9) + 0.1 * torch.normal(h.detach(), 0.5)
        h = h + 0.01 * torch.randint_like(h, 3) + 0.01 * torch.randint(0, 4, (h.shape[0], 1, 1))
        h = h + F.scaled_dot_product_attention(h, h[:, :4], h[:, :4], dropout_p=0.2)
        h = F.gumbel_softmax(h) + 0.1 * torch.empty_like(h).normal_()
        h = F.dropout(h.reshape(-1, WIDTH), 0.2, inplace=True).reshape(-1, LENGTH, WIDTH)
        return F.cross_entropy(self.head(h.mean(1)), label)


@cache
def built(model: type[nn.Module]) -> Built:
    torch.manual_seed(0)
    module, example = model().double(), batch(4)
    return Built(capture(module, example), Workload(module, example))


@pytest.mark.parametrize(
    ("model", "sizes", "replicas", "recompute"),
    [(Attends, [2, 3, 5], [1, 2, 1], False), (Draws, [3, 2], [2, 1], True)],
)
def test_any_plan_draws_what_one_process_draws(
    model: type[nn.Module], sizes: list[int], replicas: list[int], recompute: bool
) -> None:
    """Unequal replicas and micro-batches, recomputation: same loss, same gradients."""
    options = {"replicas": replicas, "recompute": recompute}
    chosen = plan(built(model), len(sizes), batch_size=5, microbatch_size=sizes, **options)
    loss, gradients = step(built(model), chosen, batch(5), BY_SAMPLE, seed=5, number=2)
    alone = plan(built(model), 1, batch_size=5, microbatch_size=5)
    expected, reference = step(built(model), alone, batch(5), BY_SAMPLE, seed=5, number=2)
    assert loss == pytest.approx(expected, rel=1e-10)
    assert gradients.keys() == reference.keys()
    for name, gradient in reference.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-8, atol=1e-11)


def test_seed_and_step_change_what_is_drawn() -> None:
    model = built(Attends)
    chosen = plan(model, 2, batch_size=4)
    losses = {
        step(model, chosen, batch(4), BY_SAMPLE, seed=seed, number=number)[0]
        for seed, number in ((0, 0), (0, 0), (1, 0), (0, 1))
    }
    assert len(losses) == 3


def test_the_users_generator_is_left_alone() -> None:
    model = built(Draws)
    state = torch.get_rng_state()
    step(model, plan(model, 1, batch_size=4), batch(4), BY_SAMPLE)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda x: x + torch.multinomial(x.softmax(1), 1), ("multinomial", "by sample")),
        (lambda x: x + torch.randperm(8), ("randperm", "by sample", "where batches are made")),
        (lambda x: F.dropout(x @ x.T, 0.5), ("dropout", "relates samples")),
        (
            lambda x: F.dropout(
                torch.cat([x.view(-1, 4), x.view(-1, 2, 4).transpose(0, 1).reshape(-1, 4)]), 0.5
            ),
            ("dropout", "folded in an unknown way"),
        ),
        (
            lambda x: F.dropout2d(x.view(-1, 2, 2, 2).permute(1, 2, 3, 0), 0.5),
            ("feature_dropout", "within a feature"),
        ),
    ],
    ids=["multinomial", "randperm", "pairs", "in two orders", "feature"],
)
def test_what_cannot_be_had_by_sample_is_refused(
    function: Callable[[Tensor], Tensor], words: tuple[str, ...]
) -> None:
    """The message names the operation and the reason."""
    with pytest.raises(CaptureError) as caught:
        rewritten(function, 4, (8,))
    assert all(word in str(caught.value) for word in words)


def test_recurrent_dropout_is_refused_by_name() -> None:
    class Recurrent(nn.Module):
        def __init__(self, dropout: float) -> None:
            super().__init__()
            self.rnn = nn.LSTM(8, 8, 2, dropout=dropout, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.rnn(x)[0].mean()

    for dropout in (0.5, 0.0):
        captured = capture(Recurrent(dropout), {"x": torch.ones(4, 3, 8)})
        program = split(captured, [[op.name for op in captured.graph.ops]]).program(0, 4)
        assert is_random(program.module) is (dropout > 0)
        if dropout:
            with pytest.raises(CaptureError, match=r"aten::lstm\S* in rnn"):
                BySample(captured).rewritten(program, 4)
        else:
            assert BySample(captured).rewritten(program, 4) is None


class Kept(nn.Module):
    """Shows which numbers were kept behind a layer that autocast runs in half precision."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = self.drop(self.first(x))
        kept = (h != 0).to(x) * torch.arange(WIDTH)
        return {"loss": h.float().square().mean(), "kept": kept.mean()}


def test_any_precision_draws_the_same() -> None:
    """Casts have no place among the operations of the model."""
    module, leaves = Kept(), {"x": torch.randn(16, WIDTH)}
    model = Built(capture(module, leaves), Workload(module, leaves))
    kept = [
        run(model, plan(model, 1), leaves, replace(BY_SAMPLE, precision=name))[0].metrics["kept"]
        for name in ("fp32", "bf16")
    ]
    assert kept[0] == kept[1]
