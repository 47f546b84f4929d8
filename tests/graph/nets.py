"""Small modules that the tests of this folder capture."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from anabranch.graph.capture import Captured, capture


class Net(nn.Module):
    """Linear, tanh, linear, mean squared error; ``body`` is what a test puts in between."""

    def __init__(self, body: Callable[[Net, torch.Tensor], torch.Tensor] | None = None) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.first = nn.Linear(6, 8)
            self.last = nn.Linear(8, 1)
        self.body = body or (lambda _, h: h)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.body(self, torch.tanh(self.first(x)))
        return F.mse_loss(self.last(h).squeeze(1), y)


def batch(samples: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(samples)
    return torch.randn(samples, 6, generator=generator), torch.randn(samples, generator=generator)


def one_stage(captured: Captured) -> list[list[str]]:
    return [[op.name for op in captured.graph.ops]]


def stage_each(captured: Captured) -> list[list[str]]:
    return [[op.name] for op in captured.graph.ops]


class Returns(nn.Module):
    """Returns whatever a function makes of the predictions."""

    def __init__(self, make: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.first = nn.Linear(6, 2)
        self.make = make

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        return self.make(self.first(x))


class Anything(nn.Module):
    """Takes any batch and averages what it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        leaves = torch.utils._pytree.tree_leaves((args, kwargs))
        total = sum(leaf.float().mean() for leaf in leaves if isinstance(leaf, torch.Tensor))
        scale = 2.0 if kwargs.get("double") else 1.0
        return self.weight * total * scale


class Body(nn.Module):
    """Two linear layers with something between them."""

    def __init__(self, between: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.between = between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(self.b(self.between(self.a(x)))).pow(2).mean()


class Fan(nn.Module):
    """The value of ``a`` is read four times: by b and by three products; ``a`` is tied to ``e``.

    a --+--> b --> (*) --> c --> (*) --> d --> (*) --> e
        +----------+-------------+-------------+
    """

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d, self.e = (nn.Linear(5, 5) for _ in range(5))
        self.e.weight = self.a.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = self.a(x)
        b = self.b(a)
        c = self.c(b * a)
        d = self.d(c * a)
        return self.e(d * a).pow(2).mean()


def fan() -> Captured:
    torch.manual_seed(0)
    return capture(Fan(), torch.randn(4, 5))
