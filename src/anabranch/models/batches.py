"""Batches cut out of tensors, in an order that seed and epoch decide: the same on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from anabranch.workload import Batch

Gather = Callable[[torch.Tensor], Batch]
"""Sample numbers -> the batch of these samples."""


def shuffled(rows: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """The rows in random order."""
    return rows[torch.randperm(len(rows), generator=generator)]


def batches(gather: Gather, rows: torch.Tensor, batch_size: int) -> Iterator[Batch]:
    """Every row once; the last batch may be shorter."""
    for start in range(0, len(rows), batch_size):
        yield gather(rows[start : start + batch_size])


def whole_batches(gather: Gather, rows: torch.Tensor, batch_size: int) -> Iterator[Batch]:
    """Leave out the short last batch; fewer rows than one batch are one batch nevertheless."""
    if len(rows) >= batch_size:
        rows = rows[: len(rows) // batch_size * batch_size]
    return batches(gather, rows, batch_size)
