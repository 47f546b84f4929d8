"""The two-branch transformer of GraphPipe's case study (section 7.5, Figure 10).

    inputs.0 -> 4 x (attention -> linear -> linear) --+
                                                      +-- concatenate -> mean -> classes
    inputs.1 -> 4 x (attention -> linear -> linear) --+

Nothing else is in the figure: no normalisation and no residual connections. Its widths are not
published; they are MMT's here, both linear layers ``hidden`` wide. The mean is over the sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from anabranch.models.layers import Attention, BranchClassifier, DenseLayer, Stack
from anabranch.models.sizes import Sizes
from anabranch.models.workload_builders import branches_workload
from anabranch.workload import Workload


@dataclass(frozen=True)
class TwoBranchSizes(Sizes):
    """``layers`` counts the repetitions of (attention, linear, linear) in a branch."""

    branches: int = 2
    layers: int = 4
    sequence: int = 256
    hidden: int = 1024
    heads: int = 16
    classes: int = 10
    dropout: float = 0.0
    seed: int = 0


PRESETS = {"published": TwoBranchSizes(), "small": TwoBranchSizes(sequence=16, hidden=64, heads=4)}


class Block(nn.Module):
    """One multi-head attention and two linear layers, the first with a ReLU."""

    def __init__(self, sizes: TwoBranchSizes):
        super().__init__()
        self.attention = Attention(sizes.hidden, sizes.heads, sizes.dropout)
        self.first = DenseLayer(sizes.hidden, sizes.hidden, sizes.dropout)
        self.second = nn.Linear(sizes.hidden, sizes.hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[samples, sequence, hidden] -> the same."""
        result: torch.Tensor = self.second(self.first(self.attention(x)))
        return result


class TwoBranch(BranchClassifier):
    def __init__(self, sizes: TwoBranchSizes):
        branches = [Stack(Block(sizes) for _ in range(sizes.layers)) for _ in range(sizes.branches)]
        super().__init__(branches, sizes.branches * sizes.hidden, sizes.classes, norm=False)


def workload(sizes: TwoBranchSizes, *, meta: bool = False) -> Workload:
    return branches_workload("two-branch", lambda: TwoBranch(sizes), sizes, meta=meta)
