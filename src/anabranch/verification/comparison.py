"""Gradients of a pipeline against those of one process: how far apart, and what is rounding."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from anabranch.errors import TrainingError
from anabranch.graph.capture import Captured
from anabranch.graph.slices import in_slices, view_named
from anabranch.runtime.data_parallel.buckets import dense
from anabranch.runtime.reference import ROUNDING, Reference, largest_distance


def require_signal(expected: Reference) -> None:
    """Refuse a batch of which every comparison would say that all is well."""
    has_gradient = any(bool(dense(g).any()) for g in expected.gradients.values())
    if expected.loss == 0 and not has_gradient:
        raise TrainingError(
            "nothing can be verified: the loss of this batch is 0 and so are all gradients, which "
            "any pipeline would have; give a batch that the model has something to learn from "
            "(a contrastive loss needs two samples, a masked one a sample with a label)"
        )


def merged(parts: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return the gradients that ranks hold in one mapping, and dense."""
    return {name: dense(gradient) for part in parts for name, gradient in part.items()}


def sliced_like(result: Reference, names: Iterable[str]) -> dict[str, Tensor]:
    """Return gradients in the slices of the pipeline's, and dense."""
    cut = in_slices(result.gradients, names, view_named)
    return {name: dense(gradient) for name, gradient in cut.items()}


def largest_error(
    gradients: Mapping[str, Tensor], others: Mapping[str, Tensor]
) -> tuple[float, str]:
    """Return the largest difference relative to the others, and its parameter; a gradient counts as
    a thousandth of the largest one at least.
    """
    largest = {n: float(g.abs().max()) if g.numel() else 0.0 for n, g in others.items()}
    floor = 1e-3 * max(largest.values(), default=0.0)
    return largest_distance(gradients, others, lambda name: max(largest.get(name, 0.0), floor))


def tolerance_of(captured: Captured) -> float:
    """The largest difference that is rounding in the coarsest type of the parameters, four steps of
    which may add up over the micro-batches.
    """
    types = {p.dtype for p in captured.parameters().values() if p.requires_grad}
    return max([ROUNDING, *(4 * torch.finfo(t).eps for t in types)])
