"""Batches cut out of tensors."""

import torch

from anabranch.models.batches import batches, shuffled, whole_batches


def lists(iterator):
    return [rows.tolist() for rows in iterator]


def identity(rows):
    return rows


def test_the_last_batch_may_be_shorter():
    """Evaluation sees every row once."""
    assert lists(batches(identity, torch.arange(5), 2)) == [[0, 1], [2, 3], [4]]


def test_training_leaves_the_short_batch_out():
    """Unless it is all there is."""
    assert lists(whole_batches(identity, torch.arange(5), 2)) == [[0, 1], [2, 3]]
    assert lists(whole_batches(identity, torch.arange(5), 8)) == [[0, 1, 2, 3, 4]]


def test_shuffling_keeps_every_row():
    """In an order that the seed decides."""
    rows = torch.tensor([3, 5, 7, 9])
    one, two = (shuffled(rows, torch.Generator().manual_seed(4)) for _ in range(2))
    assert one.tolist() == two.tolist()
    assert sorted(one.tolist()) == [3, 5, 7, 9]
