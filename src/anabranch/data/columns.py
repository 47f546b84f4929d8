"""Data sets by columns."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anabranch.data.random_state import seeded


class Columns:
    """A data set by columns: a rank reads only the columns that its own stages need.

    Args:
        columns: name -> values of all samples: a tensor, an array (also one on disk, such as
            ``numpy.load(..., mmap_mode="r")``), or a function of a 1-D tensor of sample numbers
            that returns the tensor of their values.
        length: number of samples; needed if all columns are functions.

    Raises:
        ValueError: if there is no column, or they differ in length.
    """

    def __init__(self, columns: Mapping[str, Any], *, length: int | None = None) -> None:
        lengths = {name: len(column) for name, column in columns.items() if not callable(column)}
        sizes = {*lengths.values(), *(() if length is None else (length,))}
        if not columns or len(sizes) != 1:
            sizes_text = ", ".join(f"{name} {size}" for name, size in lengths.items())
            raise ValueError(
                f"the columns of a data set have one length: {sizes_text or 'give it as length'}"
            )
        self._columns = dict(columns)
        self._length: int = sizes.pop()

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, sample: int) -> dict[str, Tensor]:
        return {name: values[0] for name, values in self.gather([sample]).items()}

    @property
    def column_names(self) -> list[str]:
        """Names of the columns."""
        return list(self._columns)

    def select_columns(self, names: Collection[str]) -> Columns:
        """Return the same samples with some of the columns."""
        chosen = {name: column for name, column in self._columns.items() if name in names}
        return Columns(chosen, length=self._length)

    def gather(self, samples: Sequence[int]) -> dict[str, Tensor]:
        """Return the batch of some samples."""
        numbers = torch.as_tensor(samples)
        # Random numbers of a function must not depend on the other columns that are read, so that
        # every rank that reads a column has the same values.
        seed = int(torch.randint(2**62, ())) if any(map(callable, self._columns.values())) else 0
        return {name: _values(c, numbers, seed, name) for name, c in self._columns.items()}


def _values(column: Any, numbers: Tensor, seed: int, name: str) -> Tensor:
    if callable(column):
        with seeded(seed, name):
            values: Tensor = column(numbers)
        return values
    if isinstance(column, Tensor):
        return column[numbers]
    return torch.from_numpy(np.ascontiguousarray(column[numbers.numpy()]))
