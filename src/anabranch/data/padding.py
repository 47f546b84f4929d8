"""Padding of sequences to the lengths that a plan knows."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from anabranch.errors import DataError


def pad_to_bucket(
    batch: Mapping[str, Tensor], lengths: Collection[int], fill: Mapping[str, float]
) -> dict[str, Tensor]:
    """A batch whose sequences are padded to the least of some lengths that holds them.

    Args:
        lengths: of the sequences in ``Workload.example`` and ``Workload.buckets``.
        fill: name of each tensor with sequences in dimension 1 -> what it is padded with, such as
            0 for a mask and -100 for labels; other tensors stay as they are.

    Raises:
        DataError: if a sequence is longer than all lengths.
    """
    longest = max(batch[name].shape[1] for name in fill)
    length = min((n for n in lengths if n >= longest), default=0)
    if not length:
        raise DataError(
            f"a batch has sequences of {longest}, longer than every bucket "
            f"({', '.join(map(str, sorted(lengths)))}): cut them, or add a bucket that holds them"
        )
    padded = dict(batch)
    for name, value in fill.items():
        tensor = batch[name]
        samples, used, *inner = tensor.shape
        rest = tensor.new_full((samples, length - used, *inner), value)
        padded[name] = torch.cat([tensor, rest], 1)
    return padded
