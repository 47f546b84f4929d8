"""Five chains with one trait each, and batches for them."""

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from anabranch.graph.capture import capture
from anabranch.models import build
from anabranch.models.transformer import TransformerSizes
from anabranch.workload import Workload
from tests.runtime.small import WIDTH, Built, tower

VOCABULARY = 32


class Residual(nn.Module):
    """A block with a keyword, a default and a tuple as its result."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(WIDTH), tower(1)

    def forward(
        self, x: Tensor, scale: float = 1.0, *, keep: bool
    ) -> tuple[Tensor, dict[str, Any]]:
        return x + scale * self.inner(self.norm(x)), {"keep": keep, "size": x.detach().abs().mean()}


class Blocks(nn.Module):
    """An embedding, a list of blocks, one activation that all share, and a head with children."""

    def __init__(self, depth: int = 8) -> None:
        super().__init__()
        self.words = nn.Embedding(10, WIDTH)
        self.blocks = nn.ModuleList(Residual() for _ in range(depth))
        self.act = nn.Tanh()
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3))

    def forward(self, x: Tensor, word: Tensor, label: Tensor) -> Tensor:
        h = self.words(word) + x
        for i, block in enumerate(self.blocks):
            h, _ = block(h, 0.5 + i, keep=i > 2)
            h = self.act(h)
        return F.cross_entropy(self.head(h), label)


class Convolutions(nn.Module):
    """Batch normalisation whose running means change, a stem and blocks of convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
            for _ in range(3)
        )
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor, word: Tensor, label: Tensor) -> Tensor:
        h = F.relu(self.stem(x.view(-1, 1, 2, 4)))
        for block in self.blocks:
            h = h + block(h)
        return F.cross_entropy(self.head(h.mean((2, 3))), label)


def llama() -> nn.Module:
    """Hugging Face's, whose layers get masks and tables of positions as keywords."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        tie_word_embeddings=False,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def transformer() -> nn.Module:
    sizes = TransformerSizes(
        layers=2, sequence=6, hidden=16, heads=2, feedforward=32, vocabulary=VOCABULARY
    )
    return build("transformer", options={k: str(v) for k, v in vars(sizes).items()}).module


class Summed(nn.Module):
    """A loss that is a sum over samples, of regressions in one tower."""

    def __init__(self) -> None:
        super().__init__()
        self.body = tower(4)

    def forward(self, x: Tensor, word: Tensor, label: Tensor) -> Tensor:
        return (self.body(x) - label[:, None]).square().sum()


MODELS = {
    "blocks": Blocks,
    "convolutions": Convolutions,
    "llama": llama,
    "transformer": transformer,
    "summed": Summed,
}


def batch(name: str, samples: int, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    if name in ("llama", "transformer"):
        first = torch.randint(0, VOCABULARY, (samples, 6), generator=generator)
        second = torch.randint(0, VOCABULARY, (samples, 6), generator=generator)
        if name == "llama":
            second[::3, 2:] = -100  # counts of labels differ between micro-batches
        names = ("input_ids", "labels") if name == "llama" else ("tokens", "target")
        return dict(zip(names, (first, second), strict=True))
    return {
        "x": torch.randn(samples, WIDTH, generator=generator),
        "word": torch.randint(0, 10, (samples,), generator=generator),
        "label": torch.randint(0, 3, (samples,), generator=generator),
    }


@cache
def chain(name: str) -> Built:
    torch.manual_seed(0)
    module, example = MODELS[name](), batch(name, 4)
    granularity = "layer" if name == "summed" else "block"
    return Built(capture(module, example, granularity=granularity), Workload(module, example))
