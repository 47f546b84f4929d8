"""Digests of batches and of copies."""

import pytest
import torch

from anabranch.runtime.guards.same_batch import (
    DIGESTS,
    BatchWatch,
    RecentBatches,
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


def test_one_value_in_thousands_is_seen_where_all_are_compared():
    """32 values of each tensor stand for it otherwise."""
    one = torch.arange(10_000.0).view(100, 100)
    other = one.clone()
    other[37, 61] += 1e-3
    assert batch_digest({"x": one}) == batch_digest({"x": other})
    full = [batch_digest({"x": leaf}, every_value=True) for leaf in (one, other, one.clone())]
    assert full[0] == full[2] != full[1]
    for leaf in (torch.tensor(True), torch.zeros(0), X.bfloat16(), X.t(), X > 3):
        assert batch_digest({"x": leaf}, every_value=True)


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
    odd = X.flatten()[:8].bfloat16()[1:]  # which begins between two words of 32 bits
    assert copies_digest([odd]) == copies_digest([odd.clone()]) != copies_digest([odd + 1])


def begun(*digests: bytes, run: int = 2**61, first: int = 0) -> list[int]:
    """The page of a rank that has begun batches with these digests."""
    recent = RecentBatches()
    for number, digest in enumerate(digests, first):
        recent.note(run, number, digest * 8)
    return recent.numbers


def watched(*pages: list[int], now: float = 0.0, is_over: bool = False) -> str:
    watch = BatchWatch(len(pages))
    for rank, page in enumerate(pages):
        watch.note(rank, page)
    watch.difference(0.0)
    return watch.difference(now, is_over=is_over)


def test_who_watches_sees_different_batches_of_one_number():
    """Whoever is ahead is compared in what it did before, and the odd one is named at once."""
    assert watched(begun(b"a", b"b"), begun(b"a"), begun(b"a", b"b", b"c")) == ""
    told = watched(begun(b"a", b"b"), begun(b"a", b"x", b"c"), begun(b"a", b"b"))
    assert told.startswith("rank 1 has another batch than the others")


def test_of_two_different_ones_a_third_decides_if_it_comes():
    """Otherwise the first rank counts as right."""
    pages = begun(b"a", b"x"), begun(b"a", b"b"), begun(b"a")
    assert watched(*pages, now=0.1) == ""
    assert watched(*pages, now=1.0).startswith("rank 1 has another")
    assert watched(*pages, is_over=True).startswith("rank 1 has another")
    assert watched(*pages[:2], begun(b"a", b"b"), now=0.1).startswith("rank 0 has another")


def test_batches_of_two_pipelines_in_one_process_are_not_compared():
    """They have other runs, and their ranks are not at the same one."""
    assert watched(begun(b"a", run=5**20), begun(b"b", run=7**20)) == ""


def test_only_the_last_batches_are_kept():
    """A rank that is further ahead is not compared any more."""
    many = [bytes([i]) for i in range(DIGESTS.recent_ints + 1)]
    assert watched(begun(b"x"), begun(*many)) == ""
    assert watched(begun(b"x"), begun(*many[:-1])).startswith("rank 1 has another")


def test_the_fewer_are_the_odd_ones():
    assert odd_ones(["a", "a"], [0, 1]) == ""
    assert odd_ones(["a", "b", "a", "c"], [0, 1, 2, 5]) == "ranks 1, 5 have"
    assert odd_ones(["a", "b"], [0, 1]) == "rank 1 has"
