"""Layers of the built-in models, in plain tensor operations that can be captured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import nn


class Attention(nn.Module):
    """Multi-head self-attention with dropout of its weights; if causal, to no later position."""

    def __init__(self, hidden: int, heads: int, dropout: float = 0.0, *, causal: bool = False):
        super().__init__()
        if hidden % heads:
            raise ValueError(f"hidden={hidden} is not divisible by heads={heads}")
        self.heads, self.dropout, self.causal = heads, dropout, causal
        self.query = nn.Linear(hidden, hidden)
        self.key = nn.Linear(hidden, hidden)
        self.value = nn.Linear(hidden, hidden)
        self.output = nn.Linear(hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[samples, sequence, hidden] -> the same."""
        attended = F.scaled_dot_product_attention(
            self._by_head(self.query(x)),
            self._by_head(self.key(x)),
            self._by_head(self.value(x)),
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=self.causal,
        )
        merged: torch.Tensor = self.output(attended.transpose(1, 2).flatten(2))
        return merged

    def _by_head(self, x: torch.Tensor) -> torch.Tensor:
        split: torch.Tensor = torch.unflatten(x, 2, (self.heads, -1))
        return split.transpose(1, 2)


class TransformerLayer(nn.Module):
    """Attention and a feed-forward part, each behind a norm and added to its input."""

    def __init__(
        self,
        hidden: int,
        heads: int,
        feedforward: int,
        dropout: float = 0.0,
        *,
        causal: bool = False,
    ):
        super().__init__()
        self.attention_norm = nn.LayerNorm(hidden)
        self.attention = Attention(hidden, heads, dropout, causal=causal)
        self.feedforward_norm = nn.LayerNorm(hidden)
        self.widen = nn.Linear(hidden, feedforward)
        self.narrow = nn.Linear(feedforward, hidden)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[samples, sequence, hidden] -> the same."""
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        inner = F.gelu(self.widen(self.feedforward_norm(x)))
        added: torch.Tensor = x + self.dropout(self.narrow(inner))
        return added


class DenseLayer(nn.Linear):
    """A linear layer with its ReLU and dropout: one module, so one operator.

    Initialised as He et al. (2015) do for ReLU, so that deep stacks without normalisation learn.
    """

    def __init__(self, inputs: int, outputs: int, dropout: float = 0.0):
        super().__init__(inputs, outputs)
        self.dropout = dropout
        nn.init.kaiming_uniform_(self.weight, nonlinearity="relu")
        nn.init.zeros_(self.bias)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[samples, inputs] -> [samples, outputs]."""
        x = F.relu(super().forward(input))
        return F.dropout(x, self.dropout, self.training) if self.dropout else x


class Stack(nn.Module):
    """Layers one after another."""

    def __init__(self, layers: Iterable[nn.Module]):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The first layer's input -> the last layer's output."""
        for layer in self.layers:
            x = layer(x)
        return x


class FeedForward(Stack):
    """Dense layers; ``widths`` begins with the width of the input."""

    def __init__(self, widths: Sequence[int], dropout: float = 0.0):
        super().__init__(
            DenseLayer(inputs, outputs, dropout) for inputs, outputs in pairwise(widths)
        )


class BranchClassifier(nn.Module):
    """Branches over sequences, their concatenation, its mean over the sequence, classes.

    The loss is the cross-entropy of the classes.
    """

    def __init__(self, branches: Iterable[nn.Module], width: int, classes: int, *, norm: bool):
        super().__init__()
        self.branches = nn.ModuleList(branches)
        self.norm = nn.LayerNorm(width) if norm else nn.Identity()
        self.head = nn.Linear(width, classes)

    def forward(
        self, inputs: Sequence[torch.Tensor], target: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """``inputs``: per branch [samples, sequence, hidden]; ``target``: [samples], classes."""
        joined = torch.cat([branch(x) for branch, x in zip(self.branches, inputs, strict=True)], -1)
        return classification_loss(self.head(self.norm(joined).mean(1)), target)


def classification_loss(logits: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return cross-entropy and accuracy of logits [..., classes] for right classes [...]."""
    right = logits.argmax(-1) == target
    loss = F.cross_entropy(logits.flatten(0, -2), target.flatten())
    return {"loss": loss, "accuracy": right.float().mean()}


def binary_loss(logit: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return binary cross-entropy and accuracy of logits [samples] for answers of 0 or 1."""
    right = (logit > 0) == (target > 0.5)
    loss = F.binary_cross_entropy_with_logits(logit, target)
    return {"loss": loss, "accuracy": right.float().mean()}
