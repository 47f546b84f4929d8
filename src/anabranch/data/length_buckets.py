"""Sequences padded to few lengths, and length buckets of a collator that pads to the longest."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from anabranch.data.packed import PackedBatch
from anabranch.errors import DataError, warn


def pad_to_bucket(
    batch: Mapping[str, Tensor], lengths: Collection[int], fill: Mapping[str, float]
) -> dict[str, Tensor]:
    """Pad the sequences of a batch to the shortest of some lengths that holds them.

    Args:
        lengths: lengths of the sequences in ``Workload.example`` and ``Workload.buckets``.
        fill: name of each tensor with sequences in dimension 1 -> its padding, such as 0 for a mask
            and -100 for labels; other tensors stay as they are.

    Raises:
        DataError: if a sequence is longer than all lengths.
    """
    buckets = tuple(dict.fromkeys(fill, length) for length in sorted(lengths))
    return LengthBuckets(buckets, fill)(batch)


@dataclass(frozen=True)
class LengthBuckets:
    """Lengths to which sequences are padded, and the padding.

    Attributes:
        lengths: {tensor: length} of each bucket, from the shortest to the longest.
        fill: tensor -> its padding.
        most: most buckets: each is captured once (seconds), and shortens the batches that fit.
        looked_at: most samples whose length is read, evenly spaced in a larger data set.
        multiple: divisor of all lengths except the longest.
    """

    lengths: tuple[Mapping[str, int], ...]
    fill: Mapping[str, float]

    most: ClassVar[int] = 4
    looked_at: ClassVar[int] = 20_000
    multiple: ClassVar[int] = 8

    @staticmethod
    def of(
        data_sets: Sequence[Any],
        collate: Callable[[list[Any]], Mapping[str, Tensor] | PackedBatch],
        batch_size: int,
        fill: Mapping[str, float],
    ) -> LengthBuckets | None:
        """Return the quartiles of a batch's longest sequence; None if all samples have one length.

        Raises:
            ValueError: if a tensor that cannot be padded has several lengths.
        """
        sizes_seen: list[dict[str, int]] = []
        is_packed = False
        for data in data_sets:
            for index in range(0, len(data), math.ceil(len(data) / LengthBuckets.looked_at)):
                batch = collate([data[index]])
                is_packed = isinstance(batch, PackedBatch)
                entries = batch.tensors if isinstance(batch, PackedBatch) else batch
                tensors = {n: t for n, t in entries.items() if isinstance(t, Tensor)}
                sizes_seen.append({n: t.shape[1] for n, t in tensors.items() if t.dim() > 1})
        names = [name for name in sizes_seen[0] if len({sizes[name] for sizes in sizes_seen}) > 1]
        if not names:
            return None
        if is_packed:
            raise ValueError(
                f"other sizes in other samples of {', '.join(names)}, and what multimodal_batch "
                "has made cannot be padded: let the collator pad to max_length before it, and give "
                "it images=, the most that a sample has"
            )
        if missing := [name for name in names if name not in fill]:
            raise ValueError(
                f"{', '.join(missing)} has other sizes in other samples, and no padding for it is "
                "known: let the collator pad to max_length, or give fill={name: value} besides"
            )
        if "input_ids" in names and "attention_mask" not in sizes_seen[0]:
            raise ValueError(
                "input_ids have several lengths and there is no attention_mask, so padding would "
                "be read: let the collator return one, or pad to max_length"
            )
        table = torch.tensor([[sizes[name] for name in names] for sizes in sizes_seen])
        order = torch.randperm(len(table), generator=torch.Generator().manual_seed(0))
        batches = range(0, len(table), batch_size)
        longest = torch.stack([table[order[i : i + batch_size]].amax(0) for i in batches])
        longest, most = longest.sort(0).values, table.amax(0)
        count, multiple = LengthBuckets.most, LengthBuckets.multiple
        buckets: dict[tuple[int, ...], None] = {}
        for number in range(1, count):
            at = longest[math.ceil(len(longest) * number / count) - 1]
            rounded = -(-at // multiple) * multiple
            buckets[tuple(torch.minimum(rounded, most).tolist())] = None
        buckets[tuple(most.tolist())] = None
        lengths = tuple(dict(zip(names, sizes, strict=True)) for sizes in buckets)
        if len(table) < (total := sum(map(len, data_sets))):
            warn(
                f"{len(table):,} of {total:,} samples were looked at for their lengths, at most "
                f"{lengths[-1]}: a longer one ends training when it comes, so let the collator cut "
                "there (max_length)"
            )
        return LengthBuckets(lengths, {name: fill[name] for name in names})

    def __call__(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Pad a batch to the first bucket that holds it; DataError if none does."""
        for lengths in self.lengths:
            if all(batch[name].shape[1] <= length for name, length in lengths.items()):
                return self._padded(batch, lengths)
        sizes = ", ".join(f"{name} {batch[name].shape[1]}" for name in self.fill)
        raise DataError(
            f"a batch has sequences of {sizes}, longer than all buckets ({self.lengths[-1]} at "
            "most): cut them in the collator (max_length), or add a bucket that holds them"
        )

    def examples(self, batch: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
        """Return the same batch in every bucket, the longest first, cut where it is too long."""
        return [
            self._padded(
                {n: t[:, : lengths[n]] if n in lengths else t for n, t in batch.items()}, lengths
            )
            for lengths in reversed(self.lengths)
        ]

    def _padded(self, batch: Mapping[str, Tensor], lengths: Mapping[str, int]) -> dict[str, Tensor]:
        padded = dict(batch)
        for name, length in lengths.items():
            samples, used, *inner = batch[name].shape
            rest = batch[name].new_full((samples, length - used, *inner), self.fill[name])
            padded[name] = torch.cat([batch[name], rest], 1)
        return padded
