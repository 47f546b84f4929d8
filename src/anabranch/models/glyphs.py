"""An image tower and a text tower that learn whether a name belongs to a picture of a font's glyph.

    image -> patches -> transformer layers -> largest over patches --+
                                                                     +-- cosine -> belongs or not
    name  -> words  --> transformer layers -> largest over words  ---+

Both towers have the same layers and nearly the same number of tokens (16 patches, 12 words), so
they take about equally long. Each sample is judged by itself, whatever its micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from anabranch.data.glyphs import SIZES, load_glyphs, true_and_false_pairs
from anabranch.models.layers import TransformerLayer, binary_loss
from anabranch.models.sizes import Sizes
from anabranch.models.workload_builders import dataset_workload, seeded_generator
from anabranch.workload import Batch, Workload


@dataclass(frozen=True)
class GlyphNamesSizes(Sizes):
    """``layers`` per tower, ``patch`` in points, ``steps`` until the learning rate has decayed."""

    layers: int = 8
    hidden: int = 512
    heads: int = 8
    feedforward: int = 2048
    patch: int = 4
    buckets: int = 16384
    dropout: float = 0.0
    learning_rate: float = 3e-4
    steps: int = 10_000
    seed: int = 0


PRESETS = {
    "published": GlyphNamesSizes(),
    "small": GlyphNamesSizes(
        layers=4,
        hidden=64,
        heads=4,
        feedforward=128,
        patch=8,
        buckets=4096,
        learning_rate=2e-3,
        steps=1500,
    ),
}


class Patches(nn.Module):
    """Cuts a picture into squares and maps each to a token."""

    def __init__(self, patch: int, hidden: int):
        super().__init__()
        if SIZES.side % patch:
            raise ValueError(f"patch={patch} does not divide the pictures' {SIZES.side} points")
        self.patch = patch
        self.project = nn.Linear(patch * patch, hidden)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """[samples, 32, 32] -> [samples, patches, hidden]."""
        across = SIZES.side // self.patch
        rows = torch.unflatten(image, 1, (across, self.patch))
        squares = torch.unflatten(rows, 3, (across, self.patch)).transpose(2, 3)
        tokens: torch.Tensor = self.project(squares.flatten(3).flatten(1, 2))
        return tokens


class Words(nn.Module):
    """Maps words to tokens: each is the sum of its pieces' embeddings."""

    def __init__(self, buckets: int, hidden: int):
        super().__init__()
        self.pieces = nn.Embedding(buckets, hidden, padding_idx=0)
        with torch.no_grad():
            # About ten pieces are added up; the padding row stays zero.
            self.pieces.weight.mul_(0.3)

    def forward(self, pieces: torch.Tensor) -> torch.Tensor:
        """[samples, words, pieces] -> [samples, words, hidden]."""
        embedded: torch.Tensor = self.pieces(pieces)
        return embedded.sum(2)


class Tower(nn.Module):
    """Tokens, transformer layers, one vector of length 1."""

    def __init__(self, embed: nn.Module, tokens: int, sizes: GlyphNamesSizes):
        super().__init__()
        self.embed = embed
        self.position = nn.Parameter(torch.randn(tokens, sizes.hidden) * 0.02)
        self.layers = nn.ModuleList(
            TransformerLayer(sizes.hidden, sizes.heads, sizes.feedforward, sizes.dropout)
            for _ in range(sizes.layers)
        )
        self.norm = nn.LayerNorm(sizes.hidden)
        self.project = nn.Linear(sizes.hidden, sizes.hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[samples, ...] -> [samples, hidden]."""
        x = self.embed(x) + self.position
        for layer in self.layers:
            x = layer(x)
        return F.normalize(self.project(self.norm(x).amax(1)), dim=-1)


class GlyphNames(nn.Module):
    """Both towers and a logit from the cosine of their vectors; binary cross-entropy."""

    def __init__(self, sizes: GlyphNamesSizes):
        super().__init__()
        patches = (SIZES.side // sizes.patch) ** 2
        self.image = Tower(Patches(sizes.patch, sizes.hidden), patches, sizes)
        self.text = Tower(Words(sizes.buckets, sizes.hidden), SIZES.words, sizes)
        self.head = nn.Linear(1, 1)
        with torch.no_grad():
            # Unrelated vectors have a cosine near 0, which should say no (as in SigLIP).
            self.head.weight.fill_(10.0)
            self.head.bias.fill_(-3.0)

    def forward(
        self, image: torch.Tensor, name: torch.Tensor, target: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """``image``: [samples, 32, 32]; ``name``: [samples, words, pieces]; ``target``: 0 or 1."""
        cosine = (self.image(image) * self.text(name)).sum(-1, keepdim=True)
        return binary_loss(self.head(cosine).squeeze(-1), target)


def workload(sizes: GlyphNamesSizes, *, meta: bool = False) -> Workload:
    """Return the two towers on true and false pairs; held-out glyphs form pairs of their own."""
    glyphs = load_glyphs(sizes.buckets)

    def gather(pairs: torch.Tensor) -> Batch:
        picture, name, belongs = pairs.unbind(1)
        return {
            "image": glyphs.images[picture],
            "name": glyphs.pieces[name],
            "target": belongs.float(),
        }

    held_out = true_and_false_pairs(glyphs.held_out, seeded_generator(0))
    workload = dataset_workload(
        "glyphs",
        lambda: GlyphNames(sizes),
        gather,
        partial(true_and_false_pairs, glyphs.training),
        held_out,
        sizes,
        example=held_out,
        meta=meta,
        chance={"accuracy": 0.5},
    )
    return replace(workload, clip_norm=1.0)
