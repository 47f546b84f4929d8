"""Who sums which gradients."""

from __future__ import annotations

from anabranch.plans.rings import Holder, Ring, rings


def test_replicas_of_a_stage_and_holders_of_a_tied_parameter():
    """A stage alone on one device has nothing to sum; with another that holds the same, it has."""
    holders = [Holder((0,), 1, 1.0), Holder((1, 2), 1, 1.0)]
    assert list(rings({(0,): 8, (1,): 4, (0, 1): 2}, holders)) == [
        Ring((0, 1), (0, 1, 2), 2),
        Ring((1,), (1, 2), 4),
    ]


def test_one_ring_per_shard():
    """Two replicas of two devices each: the first of each sum one half, the second the other."""
    holders = [Holder((0, 1, 2, 3), 2, 0.5)]
    assert list(rings({(0,): 10}, holders)) == [
        Ring((0,), (0, 2), 5),
        Ring((0,), (1, 3), 5),
    ]


def test_holders_of_different_shards_sum_the_largest():
    """A whole copy on one device, halves on two: all three sum all of it."""
    holders = [Holder((0,), 1, 1.0), Holder((1, 2), 2, 0.5)]
    assert list(rings({(0, 1): 10}, holders)) == [Ring((0, 1), (0, 1, 2), 10)]
