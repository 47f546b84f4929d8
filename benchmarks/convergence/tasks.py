"""Tasks that are learned in seconds and still show what stale weights cost.

A perceptron of eight layers without normalisation has nothing that would hide a wrong step: it
learns small digits (scikit-learn) and MNIST digits (5,000). A transformer of eight blocks learns
the next character of Python source text, which every Python brings.

A seed decides initial weights and the order of samples, the same for every policy, so that runs of
one seed are pairs.
"""

from __future__ import annotations

import itertools
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from anabranch.graph.capture import Captured, capture
from anabranch.models.workload_builders import shuffled, whole_batches
from anabranch.workload import Batch
from benchmarks.datasets.digits import Digits, load_mnist, load_small_digits

LAYERS = 8

FILES = ("argparse", "ast", "datetime", "difflib", "doctest", "inspect", "mailbox", "optparse")
FILES += ("pathlib", "pdb", "pickle", "pickletools", "smtplib", "socket", "ssl", "statistics")
FILES += ("subprocess", "tarfile", "threading", "turtle", "typing", "uuid", "zipfile")
"""Of the standard library, by name; those that a Python has as single files are read."""

WINDOW = 32
"""Characters that are seen at once; the next one is asked for after each."""

CHARACTERS = 97
"""Printable ones of ASCII, the end of a line, and one for all others."""

HELD_OUT_EVERY = 6
"""One in this many files is held out."""

ASKED = 512
"""Windows of the held-out text."""


class Perceptron(nn.Module):
    """Linear layers with ReLU between them, and the loss.

    Args:
        widths: of the input, between layers, and number of classes.
    """

    def __init__(self, widths: Sequence[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(into, out) for into, out in itertools.pairwise(widths)
        )

    def scores(self, x: Tensor) -> Tensor:
        """Of every class: [samples, classes]."""
        for layer in self.layers[:-1]:
            x = F.relu(layer(x))
        return self.layers[-1](x)

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(self.scores(x), label)

    def reset(self, seed: int) -> None:
        """Initial weights of a run, after He et al., so that signals keep their size."""
        generator = torch.Generator().manual_seed(seed)
        for layer in self.layers:
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu", generator=generator)
            nn.init.zeros_(layer.bias)


class Block(nn.Module):
    """Attention, then two linear layers, each added to what was there, normalised."""

    def __init__(self, width: int, heads: int, *, causal: bool = True) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.before, self.qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.between, self.up = nn.LayerNorm(width), nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[samples, places, width], as it comes."""
        samples, places, width = x.shape
        qkv = self.qkv(self.before(x)).view(samples, places, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(seen.transpose(1, 2).reshape(x.shape))
        return x + self.down(F.relu(self.up(self.between(x))))


class Characters(nn.Module):
    """A transformer that says the next character after every place, and the loss."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CHARACTERS, width)
        self.place = nn.Parameter(torch.zeros(WINDOW, width))
        self.layers = nn.ModuleList(Block(width, heads) for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CHARACTERS)

    def scores(self, x: Tensor) -> Tensor:
        """Of every character: [samples times places, characters]."""
        x = self.embedding(x) + self.place
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x)).flatten(0, 1)

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(self.scores(x), label.flatten())

    def reset(self, seed: int) -> None:
        """Initial weights of a run, those of torch."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            for module in self.modules():
                if isinstance(module, nn.Embedding | nn.LayerNorm | nn.Linear):
                    module.reset_parameters()
            nn.init.normal_(self.place, std=0.02)


@dataclass(frozen=True, eq=False)
class Task:
    """A model and its data.

    Attributes:
        name: of the task.
        module: is trained in place.
        captured: the module's operators.
        epoch: seed, epoch -> numbers of training samples, in order.
        gather: numbers of samples -> inputs and labels.
        held_out: numbers of samples to be asked.
        batch_size: samples of a mini-batch.
    """

    name: str
    module: Perceptron | Characters
    captured: Captured
    epoch: Callable[[int, int], Tensor]
    gather: Callable[[Tensor], dict[str, Tensor]]
    held_out: Tensor
    batch_size: int

    def batches(self, seed: int, epoch: int) -> Iterator[Batch]:
        """The mini-batches of an epoch."""
        return whole_batches(self.gather, self.epoch(seed, epoch), self.batch_size)

    def stages(self, count: int) -> list[list[str]]:
        """Operators per stage, with as many layers in each."""
        found: list[list[str]] = [[] for _ in range(count)]
        layer = 0
        for op in self.captured.graph.ops:
            part, *rest = op.name.split(".")
            layer = int(rest[0]) if part == "layers" else layer
            found[layer * count // LAYERS].append(op.name)
        return found

    @torch.no_grad()
    def accuracy(self) -> float:
        """Share of the held-out digits or characters that are right."""
        right = asked = 0
        for rows in self.held_out.split(128):
            batch = self.gather(rows)
            found = self.module.scores(batch["x"]).argmax(1) == batch["label"].flatten()
            right, asked = right + int(found.sum()), asked + found.numel()
        return right / asked


def _order(seed: int, epoch: int) -> torch.Generator:
    return torch.Generator().manual_seed(1_000_003 * seed + epoch)


def _task(
    name: str,
    module: Perceptron | Characters,
    epoch: Callable[[int, int], Tensor],
    gather: Callable[[Tensor], dict[str, Tensor]],
    held_out: Tensor,
    batch_size: int,
) -> Task:
    captured = capture(module, gather(held_out[:batch_size]))
    return Task(name, module, captured, epoch, gather, held_out, batch_size)


def _digits(name: str, digits: Digits, width: int) -> Task:
    x = digits.images.flatten(1)
    module = Perceptron([x.shape[1], *[width] * (LAYERS - 1), 10])

    def epoch(seed: int, epoch: int) -> Tensor:
        return shuffled(digits.training, _order(seed, epoch))

    def gather(rows: Tensor) -> dict[str, Tensor]:
        return {"x": x[rows], "label": digits.digit[rows]}

    return _task(name, module, epoch, gather, digits.held_out, 32)


def source_text() -> tuple[Tensor, Tensor]:
    """Numbers of the characters in the files for training, and in those held out."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    texts = [
        path.read_text(encoding="utf-8")
        for path in (folder / f"{name}.py" for name in FILES)
        if path.is_file()
    ]
    numbers = [torch.tensor([_number(character) for character in text]) for text in texts]
    training = [text for i, text in enumerate(numbers) if i % HELD_OUT_EVERY]
    return torch.cat(training), torch.cat(numbers[::HELD_OUT_EVERY])


def _number(character: str) -> int:
    code = ord(character)
    return code - 31 if 32 <= code < 127 else 0 if character == "\n" else 96


def charlm(width: int = 32, steps: int = 50, batch_size: int = 16) -> Task:
    """Characters of source text; an epoch has so many updates."""
    training, held_out = source_text()
    text = torch.cat([training, held_out])
    window = torch.arange(WINDOW)

    def epoch(seed: int, epoch: int) -> Tensor:
        most = len(training) - WINDOW
        return torch.randint(most, (steps * batch_size,), generator=_order(seed, epoch))

    def gather(rows: Tensor) -> dict[str, Tensor]:
        places = rows[:, None] + window
        return {"x": text[places], "label": text[places + 1]}

    asked = torch.linspace(0, len(held_out) - WINDOW - 1, ASKED).long() + len(training)
    return _task("charlm", Characters(width, 4), epoch, gather, asked, batch_size)


TASKS: dict[str, Callable[[], Task]] = {
    "digits": cache(lambda: _digits("digits", load_small_digits(), 32)),
    "mnist": cache(lambda: _digits("mnist", load_mnist(), 64)),
    "charlm": cache(charlm),
}
"""Name -> task, made once."""
