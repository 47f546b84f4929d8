"""Dimensions of the samples; values where they share one, sent as views that can be cut."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from anabranch.graph.call_traits import batch_dim
from anabranch.graph.capture import Captured, capture
from anabranch.graph.cutting.split import split
from tests.graph.chain import check_split, random_stages

Before = Callable[[Tensor], Tensor]


class Layer(nn.Module):
    """A residual layer, whose sum is made outside of its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(6), nn.Sequential(nn.Linear(6, 9), nn.GELU())
        self.back, self.drop = nn.Linear(9, 6), nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.back(self.mlp(self.norm(x))))


class Tower(nn.Module):
    """Layers that see the samples of a batch folded with something else."""

    def __init__(self, fold: Before, unfold: Before) -> None:
        super().__init__()
        self.fold, self.unfold = fold, unfold
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(6, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.fold(x)
        for layer in self.layers:
            h = layer(h)
        return F.mse_loss(self.head(self.unfold(h)).squeeze(-1), y)


FOLDS: dict[str, tuple[Before, Before]] = {
    "frames": (lambda x: x.flatten(0, 1), lambda h: h.unflatten(0, (-1, 4)).mean(1)),
    "two views": (
        lambda x: torch.cat([x[:, 0], x[:, 1]]),
        lambda h: torch.sub(*h.chunk(2)),
    ),
    "views of frames": (
        lambda x: torch.cat([x[:, :2].flatten(0, 1), x[:, 2:].flatten(0, 1)]),
        lambda h: h.unflatten(0, (2, -1, 2)).mean((0, 2)),
    ),
    "time first": (
        lambda x: x.transpose(0, 1).reshape(1, -1, 6),
        lambda h: h.reshape(4, -1, 6).mean(0),
    ),
    "rows by number": (
        lambda x: (h := x.flatten(0, 1))[torch.arange(h.shape[0])],
        lambda h: h.unflatten(0, (-1, 4)).mean(1),
    ),
}


def captured(name: str) -> tuple[Captured, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    batch = torch.randn(4, 4, 6), torch.randn(4)
    return capture(Tower(*FOLDS[name]), batch), batch


@pytest.mark.parametrize("name", FOLDS)
def test_layers_on_folded_samples_are_operators(name: str) -> None:
    """Two layers can be two stages, though no slice of samples is a slice of their values. Views
    change no number: gradients are bitwise in exact mode, to rounding otherwise. What dropout made
    in training is made by another call in evaluation.
    """
    model, batch = captured(name)
    names = [op.name for op in model.graph.ops]
    assert {"layers.0.mlp", "layers.1.mlp"} <= {n.partition("#")[0] for n in names}
    for seed in range(2):
        stages = random_stages(model.graph, 4, seed)
        assert check_split(model, batch, stages, exact=True) == 0.0
        assert check_split(model, batch, stages, exact=False) < 1e-6
    assert [op.name for op in model.evaluation().graph.ops] == names


def test_slices_of_samples_make_slices_of_what_is_sent() -> None:
    """A stage with half of the samples sends half of the rows, whatever they were folded with."""
    model, _ = captured("views of frames")
    parts = split(model, [[op.name] for op in model.graph.ops])
    two, four = (
        {shape for s in range(len(model.graph)) for shape, _ in parts.program(s, n).shapes.values()}
        for n in (2, 4)
    )
    assert (2, 2, 2, 6) in two
    assert (4, 2, 2, 6) in four


class Frames(Tower):
    """A tower over any number of frames per sample."""

    def __init__(self) -> None:
        super().__init__(*FOLDS["frames"])

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.unfold = lambda h: h.unflatten(0, (y.shape[0], -1)).mean(1)
        return super().forward(x, y)


def test_bucket_with_one_of_what_is_folded_has_the_same_operators() -> None:
    """Batches with one frame per sample are cut at the places of those with four."""
    model = capture(Frames(), (torch.randn(4, 4, 6), torch.randn(4)))
    one = torch.randn(4, 1, 6), torch.randn(4)
    assert [op.name for op in model.like(one).graph.ops] == [op.name for op in model.graph.ops]


def test_unknown_order_is_not_cut() -> None:
    """Rows that are drawn from a dimension of several samples may belong to any of them."""
    drawn = FOLDS["frames"][0], lambda h: h.unflatten(0, (-1, 4)).mean(1)
    module = Tower(lambda x: (h := drawn[0](x))[torch.randperm(h.shape[0])], drawn[1])
    model = capture(module, (torch.randn(4, 4, 6), torch.randn(4)))
    assert not any(op.name == "layers.1.mlp" for op in model.graph.ops)


@pytest.mark.parametrize(
    ("small", "large", "dim"),
    [((4, 6), (8, 6), 0), ((3, 4), (3, 8), 1), ((4, 4), (4, 4), None), ((4, 4), (8, 4), 0)],
)
def test_batch_dim(small: tuple[int, ...], large: tuple[int, ...], dim: int | None) -> None:
    """The dimension that grows from 4 to 8 with the samples, even where another is 4 as well."""
    assert batch_dim(torch.empty(small), torch.empty(large), (4, 8)) == dim


@pytest.mark.parametrize(
    ("small", "large"), [((12, 6), (24, 6)), ((4, 4), (8, 8)), ((5, 6), (9, 6))]
)
def test_batch_dim_refuses(small: tuple[int, ...], large: tuple[int, ...]) -> None:
    """Folded, in two dimensions, or one more than the samples."""
    with pytest.raises(ValueError, match="folded"):
        batch_dim(torch.empty(small), torch.empty(large), (4, 8))
