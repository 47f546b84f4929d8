"""CANDLE-Uno, a drug-response model of precision medicine (GraphPipe, appendix A.2).

    inputs.0 -> 4 dense layers --+
    ...                          +-- concatenate -> 4 dense layers -> response
    inputs.6 -> 4 dense layers --+

All dense layers are 4096 wide. The paper gives seven branches of four (section 7.2 counts eight,
Figure 7 varies them up to 16). It gives neither the width of the inputs, here that of the layers,
nor what follows the concatenation, here the four layers of FlexFlow's version of the benchmark.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from anabranch.models.layers import FeedForward
from anabranch.models.sizes import Sizes
from anabranch.models.workload_builders import Draw, prototypes, synthetic_workload, under_noise
from anabranch.workload import Batch, Workload


@dataclass(frozen=True)
class CandleUnoSizes(Sizes):
    """``features``: width of each branch's input; ``top_layers``: layers after concatenation."""

    branches: int = 7
    layers: int = 4
    top_layers: int = 4
    features: int = 4096
    width: int = 4096
    dropout: float = 0.0
    seed: int = 0


PRESETS = {"published": CandleUnoSizes(), "small": CandleUnoSizes(features=64, width=128)}


class CandleUno(nn.Module):
    """One feed-forward branch per kind of feature, a feed-forward trunk, one number."""

    def __init__(self, features: Sequence[int], sizes: CandleUnoSizes):
        super().__init__()
        width, dropout = sizes.width, sizes.dropout
        self.branches = nn.ModuleList(
            FeedForward([inputs] + [width] * sizes.layers, dropout) for inputs in features
        )
        joined = width * len(features)
        self.top = FeedForward([joined] + [width] * sizes.top_layers, dropout)
        self.head = nn.Linear(width if sizes.top_layers else joined, 1)

    def forward(
        self, inputs: Sequence[torch.Tensor], target: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """``inputs``: per branch [samples, features]; ``target``: [samples], mean 0, variance 1.

        The metric ``r2`` is the explained share of the variance: 0 for guessing the mean.
        """
        joined = torch.cat([branch(x) for branch, x in zip(self.branches, inputs, strict=True)], -1)
        loss = F.mse_loss(self.head(self.top(joined)).squeeze(-1), target)
        return {"loss": loss, "r2": 1 - loss}


def response(sizes: CandleUnoSizes) -> Draw:
    """Draw a normal response; each branch's features show it along a direction of their own."""
    patterns = prototypes(sizes.branches, sizes.features, sizes.seed)

    def draw(samples: int, generator: torch.Generator) -> Batch:
        target = torch.randn(samples, generator=generator)
        inputs = [
            under_noise(torch.outer(target, pattern), (sizes.features,), generator)
            for pattern in patterns
        ]
        return {"inputs": inputs, "target": target}

    return draw


def workload(sizes: CandleUnoSizes, *, meta: bool = False) -> Workload:
    return synthetic_workload(
        "candle-uno",
        lambda: CandleUno([sizes.features] * sizes.branches, sizes),
        response(sizes),
        sizes,
        meta=meta,
        width=sizes.width,
        chance={"r2": 0.0},
    )
