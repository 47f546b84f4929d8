"""Tasks that are learned in seconds and still show what stale weights cost.

A perceptron of eight layers without normalisation has nothing that would hide a wrong step: small
digits (scikit-learn), MNIST digits (5,000), and the next character of Python source text, which
every Python brings.

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

from anabranch.data.batches import shuffled, whole_batches
from anabranch.data.digits import Digits, load_mnist, load_small_digits
from anabranch.graph.capture import Captured, capture
from anabranch.workload import Batch

LAYERS = 8

FILES = ("argparse", "ast", "datetime", "difflib", "doctest", "inspect", "mailbox", "optparse")
FILES += ("pathlib", "pdb", "pickle", "pickletools", "smtplib", "socket", "ssl", "statistics")
FILES += ("subprocess", "tarfile", "threading", "turtle", "typing", "uuid", "zipfile")
"""Of the standard library, by name; those that a Python has as single files are read."""

CONTEXT = 16
"""Characters that are seen before the one that is asked for."""

CHARACTERS = 97
"""Printable ones of ASCII, the end of a line, and one for all others."""

HELD_OUT_EVERY = 6
"""One in this many pieces of the text is held out."""


class Perceptron(nn.Module):
    """Linear layers with ReLU between them, and the loss.

    Args:
        widths: of the input, between layers, and number of classes.
        characters: numbers of characters come in, so that an embedding is before the first layer.
    """

    def __init__(self, widths: Sequence[int], *, characters: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CHARACTERS, widths[0] // CONTEXT) if characters else None
        self.layers = nn.ModuleList(
            nn.Linear(into, out) for into, out in itertools.pairwise(widths)
        )

    def scores(self, x: Tensor) -> Tensor:
        """[samples, classes]."""
        if self.embedding is not None:
            x = self.embedding(x).flatten(1)
        for layer in self.layers[:-1]:
            x = F.relu(layer(x))
        return self.layers[-1](x)

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(self.scores(x), label)

    def reset(self, seed: int) -> None:
        """Initial weights of a run, after He et al., so that signals keep their size."""
        generator = torch.Generator().manual_seed(seed)
        if self.embedding is not None:
            nn.init.normal_(self.embedding.weight, generator=generator)
        for layer in self.layers:
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu", generator=generator)
            nn.init.zeros_(layer.bias)
        for parameter in self.parameters():
            parameter.grad = None


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
    module: Perceptron
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
            part, _, number = op.name.partition(".")
            layer = int(number.partition(".")[0]) if part == "layers" else layer
            found[layer * count // LAYERS].append(op.name)
        return found

    @torch.no_grad()
    def accuracy(self) -> float:
        """Share of the held-out samples that are answered rightly."""
        asked = self.gather(self.held_out)
        right = self.module.scores(asked["x"]).argmax(1) == asked["label"]
        return float(right.float().mean())


def _order(seed: int, epoch: int) -> torch.Generator:
    return torch.Generator().manual_seed(1_000_003 * seed + epoch)


def _task(
    name: str,
    module: Perceptron,
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
    """Character numbers of the files for training, and of others for asking."""
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


def _charlm(width: int = 128, asked: int = 8192, steps: int = 250, batch_size: int = 64) -> Task:
    training, held_out = source_text()
    text = torch.cat([training, held_out])
    window = torch.arange(CONTEXT)
    module = Perceptron([16 * CONTEXT, *[width] * (LAYERS - 1), CHARACTERS], characters=True)

    def epoch(seed: int, epoch: int) -> Tensor:
        most = len(training) - CONTEXT
        return torch.randint(most, (steps * batch_size,), generator=_order(seed, epoch))

    def gather(rows: Tensor) -> dict[str, Tensor]:
        return {"x": text[rows[:, None] + window], "label": text[rows + CONTEXT]}

    places = torch.linspace(0, len(held_out) - CONTEXT - 1, asked).long() + len(training)
    return _task("charlm", module, epoch, gather, places, batch_size)


TASKS: dict[str, Callable[[], Task]] = {
    "digits": cache(lambda: _digits("digits", load_small_digits(), 32)),
    "mnist": cache(lambda: _digits("mnist", load_mnist(), 64)),
    "charlm": cache(_charlm),
}
"""Name -> task, made once."""
