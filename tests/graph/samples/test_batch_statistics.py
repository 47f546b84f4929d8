"""Sums that a coupled loss reads are sent as rows, and the layers keep their micro-batches."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from anabranch.graph.capture import capture
from anabranch.graph.samples.batch_statistics import WHOLE_BATCH_LOSS
from tests.losses import WIDTH, Balanced, Captioned, Centred, Contrastive, RootMean, batch


def whole(module: nn.Module) -> tuple[list[str], list[str]]:
    """Operators that have micro-batches, and those that have the whole batch."""
    ops = capture(module, batch(4)).graph.ops
    return [op.name for op in ops if not op.whole_batch], [op.name for op in ops if op.whole_batch]


def test_a_balance_of_experts_is_an_operator_of_its_own() -> None:
    """Layers and head have micro-batches; the loss reads one row per sample: of each layer's tokens
    per expert (no gradient) and probabilities, and of the loss by token.
    """
    graph = capture(Balanced(), batch(4)).graph
    assert [op.name for op in graph.ops if op.whole_batch] == [WHOLE_BATCH_LOSS]
    assert {"body.0", "gates.0", "gates.1", "head"} <= {op.name for op in graph.ops}
    loss = graph.index[WHOLE_BATCH_LOSS]
    read = [value for value in graph.values if loss in value.consumers]
    sizes = sorted((value.nbytes, value.grad) for value in read if value.producer >= 0)
    assert sizes == [(4, True), (16, False), (16, True), (16, True), (32, False)]
    assert all(value.batched for value in read)


def test_a_loss_by_token_beside_a_contrastive_one_has_micro_batches() -> None:
    """So has the layer before it, whose scores for all tokens are not gathered."""
    sliced, together = whole(Captioned())
    assert "head" in sliced
    assert together == [WHOLE_BATCH_LOSS]


@pytest.mark.parametrize("module", [Contrastive(), Centred(), RootMean()])
def test_other_coupled_losses_are_grouped_as_they_are(module: nn.Module) -> None:
    """Pairs of samples have no sum; a mean that goes back to the samples is where it is read."""
    sliced, together = whole(module)
    is_sum = isinstance(module, RootMean)
    assert together == ([WHOLE_BATCH_LOSS] if is_sum else together)
    assert len(together) == 1
    assert WHOLE_BATCH_LOSS not in (sliced if is_sum else [*sliced, *together])


class Decorrelated(nn.Module):
    """A matrix over the features, larger than the features of a sample, and what is beside its
    diagonal.
    """

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, 64), nn.Tanh(), nn.Linear(64, 64))

    def forward(self, x: Tensor, y: Tensor, label: Tensor) -> Tensor:
        h = self.body(y)
        products = h.T @ h / len(h)
        return (products - torch.eye(64, device=h.device)).square().sum()


def test_a_sum_that_is_larger_than_what_it_sums_stays_where_it_is_read() -> None:
    """Rows of 64 x 64 numbers would be sent in place of 64."""
    _, together = whole(Decorrelated())
    assert WHOLE_BATCH_LOSS not in together
    assert len(together) == 1


class PerToken(Balanced):
    """A balance whose shares weigh the probabilities token by token."""

    def forward(self, x: Tensor, y: Tensor, label: Tensor) -> Tensor:
        tokens = self.body(x).flatten(0, 1)
        probabilities = self.gates[0](tokens).softmax(-1)
        chosen = probabilities.topk(2).indices.flatten()
        share = torch.histc(chosen.float(), 4, 0, 3) / len(tokens)
        weighed = (probabilities * share).sum(-1).mean()
        return weighed + F.mse_loss(self.head(tokens), torch.zeros_like(self.head(tokens)))


def test_a_count_that_weighs_samples_couples_them() -> None:
    """Counts of tokens by expert say where these begin, and are constants there; a share of the
    batch's tokens is none.
    """
    graph = capture(PerToken(), batch(4)).graph
    assert graph.loss_kind == "coupled"


class ByFrequency(nn.Module):
    """Tables whose gradients are divided by how often a row was looked up."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, WIDTH, scale_grad_by_freq=True)
        self.bag = nn.EmbeddingBag(5, WIDTH, scale_grad_by_freq=True)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, word: Tensor, words: Tensor) -> Tensor:
        return self.head(self.table(word) + self.bag(words)).square().mean()


def test_a_gradient_that_counts_lookups_has_the_whole_batch() -> None:
    """A micro-batch would count its own."""
    example = torch.zeros(4, dtype=torch.long), torch.zeros(4, 2, dtype=torch.long)
    ops = capture(ByFrequency(), example).graph.ops
    assert {op.name: op.whole_batch for op in ops} == {"table": True, "bag": True, "head": False}


class RandomWeights(nn.Module):
    """A mean by weights that are drawn in place."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        weights = torch.empty_like(x).uniform_()
        return (self.head(x) * weights).sum() / weights.sum()


def test_a_sum_of_drawn_numbers_is_no_statistic() -> None:
    """It would be drawn once for the statistic, and once more in the forward."""
    captured = capture(RandomWeights(), torch.randn(4, WIDTH))
    assert captured.graph.loss_kind == "coupled"
    assert not captured.programs.statistics
