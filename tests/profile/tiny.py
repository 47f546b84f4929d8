"""Small models that the tests of this folder measure and estimate."""

from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from anabranch.graph.capture import Captured, capture


class Layer(nn.Module):
    """A transformer layer."""

    def __init__(self, width: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads = heads
        self.first = nn.LayerNorm(width)
        self.project = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.second = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.project(self.first(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value)
        x = x + self.dropout(self.out(mixed.transpose(1, 2).reshape(batch, length, width)))
        return x + self.dropout(self.down(F.gelu(self.up(self.second(x)))))


class TwoTowers(nn.Module):
    """Words and pixels, each through transformer layers; their means side by side, ten classes."""

    def __init__(self, width: int = 16, heads: int = 2, layers: int = 2) -> None:
        super().__init__()
        self.words = nn.Embedding(50, width)
        self.text = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.pixels = nn.Linear(12, width)
        self.image = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.head = nn.Linear(2 * width, 10)

    def forward(self, text: Tensor, image: Tensor, label: Tensor) -> Tensor:
        x, y = self.words(text), self.pixels(image)
        for a, b in zip(self.text, self.image, strict=True):
            x, y = a(x), b(y)
        return F.cross_entropy(self.head(torch.cat([x.mean(1), y.mean(1)], 1)), label)


class Convolutions(nn.Module):
    """Two convolutions with batch statistics (buffers that change) and dropout (random numbers)."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Dropout(0.5),
            nn.Conv2d(8, 8, 3),
            nn.ReLU(),
        )
        self.head = nn.Linear(8, 5)

    def forward(self, image: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.body(image).mean((2, 3))), label)


class Tables(nn.Module):
    """A recommendation model in small: bags of embeddings beside a dense input."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(100, 32, mode="sum") for _ in range(2))
        self.dense = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
        self.top = nn.Linear(72, 1)

    def forward(self, dense: Tensor, sparse: Tensor, label: Tensor) -> Tensor:
        parts = [bag(sparse[:, i]) for i, bag in enumerate(self.bags)]
        score = self.top(torch.cat([self.dense(dense), *parts], 1)).squeeze(1)
        return F.binary_cross_entropy_with_logits(score, label)


def two_towers() -> tuple[nn.Module, dict[str, Tensor]]:
    """The model and a batch of three samples."""
    torch.manual_seed(0)
    batch = {
        "text": torch.randint(0, 50, (3, 6)),
        "image": torch.randn(3, 9, 12),
        "label": torch.randint(0, 10, (3,)),
    }
    return TwoTowers(), batch


def convolutions() -> tuple[nn.Module, dict[str, Tensor]]:
    """The model and a batch of four samples."""
    torch.manual_seed(0)
    return Convolutions(), {"image": torch.randn(4, 3, 8, 8), "label": torch.randint(0, 5, (4,))}


def tables() -> tuple[nn.Module, dict[str, Tensor]]:
    """The model and a batch of four samples."""
    torch.manual_seed(0)
    batch = {
        "dense": torch.randn(4, 4),
        "sparse": torch.randint(0, 100, (4, 2, 5)),
        "label": torch.rand(4),
    }
    return Tables(), batch


MODELS = {"two-towers": two_towers, "convolutions": convolutions, "tables": tables}


@cache
def captured_towers() -> Captured:
    """The two towers, captured once in this process."""
    return capture(*two_towers())


class Normed(nn.Module):
    """A tower with batch statistics, of which one sample has none."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).square().mean()
