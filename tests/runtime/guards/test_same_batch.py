"""Digests of batches and of copies."""

from __future__ import annotations

import pytest
import torch

from anabranch.runtime.guards.same_batch import (
    all_alike,
    batch_digest,
    copies_digest,
    odd_ones,
)

X = torch.arange(12.0).view(3, 4)


def test_equal_batches_have_one_digest():
    assert batch_digest({"x": X}) == batch_digest({"x": X.clone()})


@pytest.mark.parametrize(
    "other",
    [
        {"y": X},
        {"x": X.view(4, 3)},
        {"x": X.double()},
        {"x": X + 1},
        {"x": X, "y": X},
        {"x": X.t().contiguous().t() * 2},
        {},
    ],
)
def test_names_types_sizes_and_values_count(other: dict[str, torch.Tensor]):
    assert batch_digest({"x": X}) != batch_digest(other)


def test_every_type_has_a_digest():
    """Also scalars, nothing, half precision and booleans."""
    for leaf in (torch.tensor(True), torch.zeros(0), X.bfloat16(), X > 3):
        assert batch_digest({"x": leaf}) == batch_digest({"x": leaf.clone()})


def test_sums_tell_whether_all_are_alike():
    """By Cauchy and Schwarz: n times the squares is the square of the sum for equal ones alone."""
    largest = 2**20 - 1
    for many in (1, 3, 8000):
        assert all_alike(many, float(many * largest), float(many * largest**2))
    assert not all_alike(3, 1.0 + 1 + 2, 1.0 + 1 + 4)


def test_one_bit_changes_the_digest_of_copies():
    other = X.clone()
    other.view(torch.int32)[2, 3] ^= 1
    assert copies_digest([X, X]) == copies_digest([X.clone(), X])
    assert copies_digest([X, X]) != copies_digest([X, other])
    assert copies_digest([X > 3]) != copies_digest([X > 4])


def test_the_fewer_are_the_odd_ones():
    assert odd_ones(["a", "a"], [0, 1]) == ""
    assert odd_ones(["a", "b", "a", "c"], [0, 1, 2, 5]) == "ranks 1, 5 have"
    assert odd_ones(["a", "b"], [0, 1]) == "rank 1 has"
