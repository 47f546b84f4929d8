"""Length buckets of collators that pad to the longest of a batch."""

from typing import Any

import pytest
import torch
from torch import Tensor

from anabranch.data.length_buckets import LengthBuckets
from anabranch.data.packed import PackedBatch, RowPacking
from anabranch.errors import DataError

FILL = {"input_ids": 9, "attention_mask": 0, "labels": -100}


def padded(samples: list[list[int]]) -> dict[str, Any]:
    """Tokens padded to the longest, a mask, a label for every other token, a class, and a flag as
    CLIP has it.
    """
    longest = max(map(len, samples))
    ids = torch.tensor([sample + [9] * (longest - len(sample)) for sample in samples])
    return {
        "input_ids": ids,
        "attention_mask": (ids != 9).long(),
        "labels": ids[:, : (longest + 1) // 2],
        "kind": torch.tensor([len(sample) for sample in samples]),
        "return_loss": True,
    }


def sentences(lengths: list[int]) -> list[list[int]]:
    return [[1] * length for length in lengths]


def test_buckets_are_quartiles_of_the_longest_of_a_batch() -> None:
    """Batches of one, so of the sentences themselves: 10, 20, 30 tokens, up to multiples of 8, and
    the longest as it is; labels are half as long, and have lengths of their own.
    """
    data = sentences([10] * 10 + [20] * 10 + [30] * 10 + [41] * 10)
    buckets = LengthBuckets.of([data], padded, 1, FILL)
    assert buckets is not None
    assert [sizes["input_ids"] for sizes in buckets.lengths] == [16, 24, 32, 41]
    assert [sizes["labels"] for sizes in buckets.lengths] == [8, 16, 16, 21]
    batch = buckets(padded(sentences([12, 17])))
    assert batch["input_ids"].shape == batch["attention_mask"].shape == (2, 24)
    assert (batch["input_ids"][:, 17:] == 9).all()
    assert (batch["labels"][:, 9:] == -100).all()
    assert batch["labels"].shape == (2, 16)
    assert batch["kind"].tolist() == [12, 17]
    assert not batch["attention_mask"][0, 12:].any()
    examples = buckets.examples(padded(sentences([20, 30])))
    assert [example["input_ids"].shape[1] for example in examples] == [41, 32, 24, 16]


def test_a_data_set_that_is_not_looked_at_whole_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every second sample, so the longest stays unseen."""
    monkeypatch.setattr(LengthBuckets, "looked_at", 4)
    data = sentences([5, 5, 9, 9, 9, 30, 9])
    with pytest.warns(UserWarning, match=r"4 of 7 samples .*'input_ids': 9, .*max_length"):
        LengthBuckets.of([data], padded, 1, FILL)


def test_one_length_needs_no_buckets() -> None:
    """Nor do classes, which have no sequences."""
    assert LengthBuckets.of([sentences([7] * 5)], padded, 2, FILL) is None


@pytest.mark.parametrize(
    ("without", "fill", "says"),
    [
        ("", {"input_ids": 0, "labels": 0}, "attention_mask has other sizes in other samples"),
        ("attention_mask", FILL, "there is no attention_mask, so padding would be read"),
    ],
)
def test_what_cannot_be_padded_is_refused(without: str, fill: Any, says: str) -> None:
    """A tensor without a known padding, and tokens that nothing masks."""

    def collate(samples: list[list[int]]) -> dict[str, Tensor]:
        return {name: t for name, t in padded(samples).items() if name != without}

    with pytest.raises(ValueError, match=says):
        LengthBuckets.of([sentences([3, 9])], collate, 1, fill)


def test_batches_that_are_packed_are_padded_before() -> None:
    """Their indices count the tokens of a sample, so all have to be of one length."""

    def collate(samples: list[list[int]]) -> PackedBatch:
        return PackedBatch(padded(samples), RowPacking())

    assert LengthBuckets.of([sentences([7] * 5)], collate, 2, FILL) is None
    with pytest.raises(ValueError, match=r"input_ids.*multimodal_batch has made cannot be padded"):
        LengthBuckets.of([sentences([3, 9])], collate, 1, FILL)


def test_a_longer_batch_than_all_that_were_seen_is_named() -> None:
    """With its lengths and those of the longest bucket."""
    buckets = LengthBuckets.of([sentences([3, 9, 12])], padded, 1, FILL)
    assert buckets is not None
    with pytest.raises(DataError, match=r"input_ids 13, .*'input_ids': 12.*max_length"):
        buckets(padded(sentences([13])))
