"""Slots of samples for images: the slot of each image, and the feature of each token.

If every sample has its own slots, it is computed as if it had as many images as the largest one. If
the samples of a micro-batch share slots, there are as many as the fullest micro-batch needs, and
samples are dealt to micro-batches so that all need about as many::

    images of samples     4 1 1 1 | 4 4 1 2 | 3 1 1 1      slots of a micro-batch
    each its own          4 4 4 4   4 4 4 4   4 4 4 4      16
    shared, in order      7         11        6            11
    shared, by cost       4 2 1 1 | 4 3 1 1 | 4 1 1 1  ->  9
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from anabranch.errors import DataError

AllowedSizes = int | Sequence[int] | None
"""A size, or several, of which the smallest sufficient one is taken; None for the size needed."""


@dataclass(frozen=True)
class Inputs:
    """Images or sounds of a batch.

    Attributes:
        tensors: name -> tensor with one entry per image.
        rows: rows of its slot that each image's tokens take, in order; -1: last row of the sample.
        slot_rows: rows of a slot's features.
        per_sample: number of images of each sample, if the batch tells.
    """

    tensors: Mapping[str, Tensor]
    rows: Sequence[Tensor]
    slot_rows: int
    per_sample: Sequence[int] | None = None

    def none(self) -> Inputs:
        """Return inputs of the same sizes without any image."""
        tensors = {name: tensor[:0] for name, tensor in self.tensors.items()}
        return replace(self, tensors=tensors, rows=(), per_sample=None)

    def reordered(self, order: Sequence[int], counts: Sequence[int]) -> Inputs:
        """Return the same images in another order of the samples, which have ``counts`` images."""
        starts = [sum(counts[:sample]) for sample in range(len(counts))]
        places = [starts[s] + i for s in order for i in range(counts[s])]
        tensors = {name: tensor[places] for name, tensor in self.tensors.items()}
        return replace(self, tensors=tensors, rows=[self.rows[place] for place in places])


@dataclass(frozen=True)
class Slots:
    """Numbers of images of samples; they fill the first slots of ``share`` samples that share them.

    Attributes:
        counts: images of each sample.
        is_counted: whether the batch has told these numbers.
    """

    counts: Tensor
    share: int = 1
    is_counted: bool = False

    def _is_filled(self, slots: int) -> Tensor:
        numbers = torch.arange(slots * self.share, device=self.counts.device)
        return numbers < self.counts.view(-1, self.share).sum(1)[:, None]

    def filled(self, tensor: Tensor) -> Tensor:
        """Return the entries of a tensor ``[samples, slots, ...]`` that hold an image."""
        groups = tensor.reshape(-1, self.share * tensor.shape[1], *tensor.shape[2:])
        return groups[self._is_filled(tensor.shape[1])]

    def put(self, tensor: Tensor, slots: int) -> Tensor:
        """Put the entries of images, in order, into ``[samples, slots, ...]``."""
        is_filled = self._is_filled(slots)
        result = tensor.new_zeros(*is_filled.shape, *tensor.shape[1:])
        result[is_filled] = tensor
        return result.view(len(self.counts), slots, *tensor.shape[1:])


def images_per_sample(tokens: Sequence[int], inputs: Inputs, what: str) -> list[int]:
    """Count the images of each sample by its number of placeholder tokens.

    Raises:
        DataError: if a sample has not as many tokens as features of its images.
    """
    lengths, counts, first = [len(rows) for rows in inputs.rows], [], 0
    for sample, wanted in enumerate(tokens):
        stop, features = first, 0
        if inputs.per_sample is not None:
            stop = first + inputs.per_sample[sample]
            features = sum(lengths[first:stop])
        while inputs.per_sample is None and stop < len(lengths) and features < wanted:
            features += lengths[stop]
            stop += 1
        if features != wanted:
            moved = "they would move into" if features > wanted else "it would take those of"
            after = f"sample {sample + 1}" if sample + 1 < len(tokens) else "nowhere"
            raise DataError(
                f"sample {sample} has {wanted} {what} tokens but {features} {what} features; "
                f"{moved} {after}. Tokens are cut off by truncation or missing in the text: make "
                "the text longer or the images smaller, so that every sample keeps all tokens of "
                "its own"
            )
        counts.append(stop - first)
        first = stop
    if first < len(lengths):
        raise DataError(
            f"the batch has {len(lengths)} {what} inputs, but its tokens stand for the first "
            f"{first} only; the text of a sample lacks {what} tokens"
        )
    return counts


def feature_rows(is_token: Tensor, inputs: Inputs, held: Slots, slots: int, extra: int) -> Tensor:
    """Return each token's row of features, counted over samples that share slots; 0 without one.

    Args:
        extra: rows of a sample behind those of its slots; -1 in ``Inputs.rows`` is the last.
    """
    result = torch.zeros(is_token.shape, dtype=torch.long)
    last, first = slots * inputs.slot_rows + extra, 0
    for sample, count in enumerate(held.counts.tolist()):
        before = int(held.counts[sample - sample % held.share : sample].sum())
        rows = []
        for place, own in enumerate(inputs.rows[first : first + count], before):
            start = place // slots * last + place % slots * inputs.slot_rows
            rows.append(torch.where(own < 0, last - 1, own + start))
        if rows:
            result[sample, is_token[sample].cpu()] = torch.cat(rows)
        first += count
    return result


def sufficient_size(needed: int, allowed: AllowedSizes, what: str, argument: str) -> int:
    """Return the smallest allowed size that is at least ``needed``; DataError if none is."""
    sizes = [max(needed, 1)] if allowed is None else allowed
    fitting = [size for size in ([sizes] if isinstance(sizes, int) else sizes) if size >= needed]
    if not fitting:
        raise DataError(
            f"a sample of the batch has {needed} {what}, and {argument}={allowed!r} allows fewer; "
            f"give multimodal_batch a larger {argument}, and the Workload an example of that size"
        )
    return min(fitting)


def balanced_order(costs: Sequence[float], share: int, *, by_cost: bool) -> list[int]:
    """Return an order of samples in which all groups of ``share`` cost about alike: the costliest
    first, each to the group that costs least so far. Without ``by_cost`` the order stays.

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


def take_rows(features: Tensor, index: Tensor, share: int = 1) -> Tensor:
    """Take a row of features ``[samples, rows, d]`` for each token of an index ``[samples,
    tokens]``; rows are counted over the ``share`` samples that share them.
    """
    if share > 1:
        taken: Tensor = _operator()(features, index, share)
        return taken
    return features.gather(1, index[..., None].expand(-1, -1, features.shape[-1]))


def _require_multiple(samples: int, share: int) -> None:
    if isinstance(samples, int) and samples % share:  # not for symbols of a tracer
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
    """Return a custom operator: plain operations would not show in a graph that samples share."""

    @torch.library.custom_op("anabranch::take_rows", mutates_args=())
    def take(features: Tensor, index: Tensor, share: int) -> Tensor:
        grouped, at = _grouped(features, index, share)
        return grouped.gather(1, at).reshape(*index.shape, -1)

    @take.register_fake
    def _(features: Tensor, index: Tensor, share: int) -> Tensor:
        _require_multiple(index.shape[0], share)
        return features.new_empty(*index.shape, features.shape[-1])

    def keep(ctx: Any, inputs: Any, output: Tensor) -> None:
        features, index, ctx.share = inputs
        ctx.rows = features.shape[1]
        ctx.save_for_backward(index)

    def back(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (index,) = ctx.saved_tensors
        result = gradient.new_zeros(index.shape[0], ctx.rows, gradient.shape[-1])
        grouped, at = _grouped(result, index, ctx.share)
        added = grouped.scatter_add(1, at, gradient.reshape(at.shape))
        return added.reshape(result.shape), None, None

    take.register_autograd(back, setup_context=keep)
    return take
