"""Slots that the samples of a micro-batch share, and samples dealt out so that few are needed.

With slots of its own, every sample is computed as if it had as many images as the largest. Shared
by the samples of a micro-batch, slots are as many as the fullest micro-batch needs, and samples are
dealt to micro-batches so that all have alike::

    images of samples     4 1 1 1 | 4 4 1 2 | 3 1 1 1      slots of a micro-batch
    each its own          4 4 4 4   4 4 4 4   4 4 4 4      16
    shared, in order      7         11        6            11
    shared, by cost       4 2 1 1 | 4 3 1 1 | 4 1 1 1  ->  9
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from anabranch.errors import DataError


def dealt(costs: Sequence[float], share: int, *, by_cost: bool) -> list[int]:
    """Samples in an order in which every ``share`` of them cost alike, costly ones first to the
    group that has cost least so far; or as they are.

    Raises:
        DataError: if the samples are no multiple of ``share``.
    """
    if len(costs) % share:
        raise DataError(
            f"{share} samples share their slots (share={share} of multimodal_batch), and a batch "
            f"of {len(costs)} is no multiple of it; leave out the last short batch "
            "(DataLoader(..., drop_last=True))"
        )
    if not by_cost:
        return list(range(len(costs)))
    groups: list[list[int]] = [[] for _ in range(len(costs) // share)]
    for sample in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        free = (group for group in groups if len(group) < share)
        min(free, key=lambda group: sum(costs[i] for i in group)).append(sample)
    return [sample for group in groups for sample in sorted(group)]


def take_rows(features: Tensor, index: Tensor, share: int) -> Tensor:
    """Rows of samples, ``[samples, rows, d]``, for their tokens, ``[samples, tokens]``, counted
    through the samples that share them.
    """
    if share > 1:
        taken: Tensor = _operator()(features, index, share)
        return taken
    return features.gather(1, index[..., None].expand(-1, -1, features.shape[-1]))


def _require_multiple(samples: int, share: int) -> None:
    if isinstance(samples, int) and samples % share:  # and no symbol of a tracer
        raise ValueError(
            f"{share} samples share their slots (share={share} of multimodal_batch), so a stage "
            f"computes a multiple of {share} at once, not {samples}"
        )


def _grouped(features: Tensor, index: Tensor, share: int) -> tuple[Tensor, Tensor]:
    _require_multiple(index.shape[0], share)
    at = index.reshape(-1, share * index.shape[1])[..., None].expand(-1, -1, features.shape[-1])
    return features.reshape(-1, share * features.shape[1], features.shape[-1]), at


@cache
def _operator() -> Any:
    """An operator of its own: what samples share stays within a micro-batch, which a graph of
    operations does not show.
    """

    @torch.library.custom_op("anabranch::take_rows", mutates_args=())
    def take(features: Tensor, index: Tensor, share: int) -> Tensor:
        grouped, at = _grouped(features, index, share)
        return grouped.gather(1, at).reshape(*index.shape, -1)

    @take.register_fake
    def _(features: Tensor, index: Tensor, share: int) -> Tensor:
        _require_multiple(index.shape[0], share)
        return features.new_empty(*index.shape, features.shape[-1])

    @torch.library.custom_op("anabranch::put_rows", mutates_args=())
    def put(gradient: Tensor, index: Tensor, rows: int, share: int) -> Tensor:
        width = gradient.shape[-1]
        result = gradient.new_zeros(index.shape[0], rows, width)
        grouped, at = _grouped(result, index, share)
        return grouped.scatter_add(1, at, gradient.reshape(at.shape)).reshape(result.shape)

    @put.register_fake
    def _(gradient: Tensor, index: Tensor, rows: int, share: int) -> Tensor:
        return gradient.new_empty(index.shape[0], rows, gradient.shape[-1])

    def keep(ctx: Any, inputs: Any, output: Tensor) -> None:
        features, index, ctx.share = inputs
        ctx.rows = features.shape[1]
        ctx.save_for_backward(index)

    def back(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (index,) = ctx.saved_tensors
        return put(gradient, index, ctx.rows, ctx.share), None, None

    take.register_autograd(back, setup_context=keep)
    return take
