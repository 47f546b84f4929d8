"""Slices of parameters, whose names tell the whole parameter.

``top.0.weight[1:4096:8192]`` are the columns 4096 to 8191 (dimension 1) of ``top.0.weight``. A
slice of a slice counts from where that begins. A stage holds slices as parameters of their own; in
checkpoints they are parts of the whole.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

Held = TypeVar("Held")

_NAME = re.compile(r"^(.+)\[(\d+):(\d+):(\d+)\]$")


@dataclass(frozen=True, slots=True)
class Slice:
    """Entries ``start`` to ``stop`` of one dimension of a parameter."""

    whole: str
    dim: int
    start: int
    stop: int

    @property
    def name(self) -> str:
        return f"{self.whole}[{self.dim}:{self.start}:{self.stop}]"

    def view(self, whole: Tensor) -> Tensor:
        """Return the slice of the parameter, or of a tensor of its shape, as a dense tensor."""
        whole = whole.to_dense() if whole.is_sparse else whole
        return whole.narrow(self.dim, self.start, self.stop - self.start)


def slice_named(name: str) -> Slice | None:
    """Return the slice of that name; None for a whole parameter."""
    match = _NAME.match(name)
    if match is None:
        return None
    whole, dim, start, stop = match.groups()
    return Slice(whole, int(dim), int(start), int(stop))


def whole_name(name: str) -> str:
    """Return the name of the model's parameter that a name is a slice of, or the name itself."""
    part = slice_named(name)
    return name if part is None else whole_name(part.whole)


def view_named(name: str, whole: Tensor) -> Tensor:
    """Return the slice of that name of the model's parameter, or of a tensor of its shape."""
    part = slice_named(name)
    return whole if part is None else part.view(view_named(part.whole, whole))


def in_slices(
    wholes: Mapping[str, Held], names: Iterable[str], cut: Callable[[str, Held], Held]
) -> dict[str, Held]:
    """Return parameters of a model in its order, with slices of these names in place of whole ones.

    Args:
        names: names of parameters, slices among them.
        cut: makes the slice of a name from the whole.
    """
    slices: dict[str, list[Slice]] = {}
    for name in names:
        if (part := slice_named(name)) is not None:
            slices.setdefault(whole_name(name), []).append(part)
    result: dict[str, Held] = {}
    for whole, held in wholes.items():
        parts = sorted(slices.get(whole, ()), key=lambda part: (part.whole, part.start))
        named = [part.name for part in parts] or [whole]
        result |= {name: cut(name, held) if parts else held for name in named}
    return result


def read_by_name(key: str, keys: Collection[str], read: Callable[[str], Tensor]) -> Tensor:
    """Read a tensor that is stored as it is, or whole, or in slices that make up the whole.

    Args:
        keys: keys of the stored tensors of the same whole.

    Raises:
        ValueError: if slices are missing.
    """
    if key in keys:
        return read(key)
    name = whole_name(key)
    whole = read(name) if name in keys else _joined({part: read(part) for part in keys})
    part = view_named(key, whole) if whole.dim() else whole
    return part if part is whole else part.clone()  # without the memory of the whole


def _joined(parts: Mapping[str, Tensor]) -> Tensor:
    """Join slices into the whole; a number, such as of steps, is the same in each."""
    first = next(iter(parts.values()))
    if not first.dim():
        return first
    begins = {name: _begin(name, part.dim()) for name, part in parts.items()}
    shape = [
        max(begins[name][dim] + part.shape[dim] for name, part in parts.items())
        for dim in range(first.dim())
    ]
    whole = torch.empty(shape, dtype=first.dtype, device=first.device)
    if whole.numel() != sum(part.numel() for part in parts.values()):
        raise ValueError(f"slices of {whole_name(next(iter(parts)))} are missing")
    for name, part in parts.items():
        ranges = zip(begins[name], part.shape, strict=True)
        whole[tuple(slice(begin, begin + size) for begin, size in ranges)] = part
    return whole


def _begin(name: str, dims: int) -> list[int]:
    """Return the offset at which a slice begins in each dimension of the whole."""
    part = slice_named(name)
    if part is None:
        return [0] * dims
    begin = _begin(part.whole, dims)
    begin[part.dim] += part.start
    return begin
