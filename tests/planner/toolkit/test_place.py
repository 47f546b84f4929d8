"""Stages find their places: replicas together, neighbours near each other, on every level."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.planner.toolkit.place import place, placements


@pytest.mark.parametrize(
    ("replicas", "sizes", "places"),
    [
        # Nodes of 4: the two that do not fit the first node beside the three go to the next.
        ([3, 2, 1, 2], [4, 8], [[0, 1, 2], [4, 5], [3], [6, 7]]),
        # Whole nodes first: a stage of 4 would straddle two nodes behind one of 2.
        ([2, 4, 2], [4, 8], [[4, 5], [0, 1, 2, 3], [6, 7]]),
        # Six replicas straddle nodes where they must.
        ([6, 2], [4, 8], [[0, 1, 2, 3, 4, 5], [6, 7]]),
        # Nodes of 2, racks of 4: a stage of 3 fits no node, and a rack better than two of them. On
        # two levels the second stage of 3 straddles the racks: devices 3, 4 and 5.
        ([3, 3, 1, 1], [2, 4, 8], [[0, 1, 2], [4, 5, 6], [3], [7]]),
        ([1, 3, 3, 1], [2, 4, 8], [[3], [0, 1, 2], [4, 5, 6], [7]]),
        # A rack of 4 for the stage that needs one, though others come before it.
        ([1, 1, 4, 2], [2, 4, 8], [[6], [7], [0, 1, 2, 3], [4, 5]]),
    ],
)
def test_replicas_of_a_stage_are_near_each_other(replicas, sizes, places):
    """In one node, else in one rack."""
    assert place(replicas, sizes) == places


def test_straddles_as_few_racks_as_it_can():
    """Of racks of 4 with 3, 3 and 4 devices left, a stage of 6 takes the whole one and two more."""
    placed = place([1, 1, 6, 4], [2, 4, 12])
    assert len({device // 4 for device in placed[2]}) == 2
    assert len({device // 4 for device in placed[3]}) == 1


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=8),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([1, 2, 3]),
)
def test_gives_every_device_once(replicas, node, rack):
    """Whatever the sizes."""
    placed = place(replicas, [node, node * rack, 72 * node * rack])
    assert [len(devices) for devices in placed] == replicas
    assert sorted(sum(placed, [])) == list(range(sum(replicas)))  # noqa: RUF017


def test_the_ways_to_place_two_branches():
    """Stages a1, a2, b1, b2 of one device and a join of two, on nodes of two.

    Branch after branch; from the sink, the last stages of the branches together; and the join
    spread over two nodes.
    """
    counts, height = [1, 1, 1, 1, 2], [2, 1, 2, 1, 0]
    assert list(placements(counts, height, (2, 6))) == [
        [[2], [3], [4], [5], [0, 1]],
        [[4], [2], [5], [3], [0, 1]],
        [[4], [1], [3], [5], [0, 2]],
    ]


def test_placements_that_are_the_same_come_once():
    """One stage on everything."""
    assert list(placements([4], [0], (4,))) == [[[0, 1, 2, 3]]]
