"""A sequential transformer, on which a graph pipeline can do no more than equal a sequential one.

    tokens -> embedding -> 32 causal transformer layers -> norm -> next token

As in GraphPipe's appendix A.3, with the sizes of MMT: its four branches of eight layers in a row.
The paper gives no vocabulary; here it is small, so that the layers take most of the time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from anabranch.models.layers import TransformerLayer, classification_loss
from anabranch.models.sizes import Sizes
from anabranch.models.workload_builders import Draw, seeded_generator, synthetic_workload
from anabranch.workload import Batch, Workload

SUCCESSORS = 4
"""Number of tokens that may follow each token of the synthetic language: the best loss is ln 4."""


@dataclass(frozen=True)
class TransformerSizes(Sizes):
    """``sequence`` in tokens; with ``tied`` the embedding is also the output layer's weight."""

    layers: int = 32
    sequence: int = 256
    hidden: int = 1024
    heads: int = 16
    feedforward: int = 4096
    vocabulary: int = 1024
    tied: bool = False
    dropout: float = 0.0
    seed: int = 0


PRESETS = {
    "published": TransformerSizes(),
    "small": TransformerSizes(
        layers=4, sequence=32, hidden=64, heads=4, feedforward=256, vocabulary=64
    ),
}


class Transformer(nn.Module):
    """A language model; its loss is the cross-entropy of the next token."""

    def __init__(self, sizes: TransformerSizes):
        super().__init__()
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.hidden)
        self.position = nn.Parameter(torch.zeros(sizes.sequence, sizes.hidden))
        self.layers = nn.ModuleList(
            TransformerLayer(
                sizes.hidden, sizes.heads, sizes.feedforward, sizes.dropout, causal=True
            )
            for _ in range(sizes.layers)
        )
        self.norm = nn.LayerNorm(sizes.hidden)
        self.head = nn.Linear(sizes.hidden, sizes.vocabulary, bias=False)
        nn.init.normal_(self.embedding.weight, std=sizes.hidden**-0.5)
        if sizes.tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
        """``tokens`` and ``target``: [samples, sequence]; ``target`` is the token after each."""
        x = self.embedding(tokens) + self.position
        for layer in self.layers:
            x = layer(x)
        return classification_loss(self.head(self.norm(x)), target)


def random_language(sizes: TransformerSizes) -> Draw:
    """Draw sequences of a Markov chain in which each token has a few equally likely successors."""
    successors = torch.randint(
        sizes.vocabulary, (sizes.vocabulary, SUCCESSORS), generator=seeded_generator(sizes.seed)
    )

    def draw(samples: int, generator: torch.Generator) -> Batch:
        choices = torch.randint(SUCCESSORS, (samples, sizes.sequence), generator=generator)
        text = [torch.randint(sizes.vocabulary, (samples,), generator=generator)]
        for step in range(sizes.sequence):
            text.append(successors[text[-1], choices[:, step]])
        return {"tokens": torch.stack(text[:-1], 1), "target": torch.stack(text[1:], 1)}

    return draw


def workload(sizes: TransformerSizes, *, meta: bool = False) -> Workload:
    return synthetic_workload(
        "transformer",
        lambda: Transformer(sizes),
        random_language(sizes),
        sizes,
        meta=meta,
        width=sizes.hidden,
        chance={"accuracy": 1 / sizes.vocabulary},
    )
