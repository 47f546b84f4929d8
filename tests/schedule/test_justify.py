"""Passes move: late first, then early."""

import numpy as np

from anabranch.schedule.justify import Passes, justified, links


def moved(ends, seconds, waits, lanes):
    """Starts of passes that are numbered in their order."""
    count = len(ends)
    pairs = [(n, other, between) for n, before in enumerate(waits) for other, between in before]
    numbers, others, between = np.array(pairs or np.zeros((0, 3))).T
    ways = [x.astype(np.int64) for x in (numbers, others)]
    both = links(count, *ways, between), links(count, *ways[::-1], between)
    first_lane, lane = np.cumsum([0, *map(len, lanes)]), np.concatenate(lanes)
    passes = Passes(*both, first_lane, lane)
    return [*justified(np.arange(count), np.array(ends), np.array(seconds), passes)]


def test_the_urgent_pass_goes_first():
    """Passes 0 and 1 take turns on a device, and pass 2 of another waits for 1::

    0 0 1 . .         1 0 0
    . . . 2 2         . 2 2
    """
    seconds, lanes = [2.0, 1.0, 2.0], [[0], [0], [1]]
    waits = [[], [], [(1, 0.0)]]
    assert moved([2.0, 3.0, 5.0], seconds, waits, lanes) == [1.0, 0.0, 1.0]


def test_a_message_takes_its_time():
    """Half a second between a pass and the one that waits for it."""
    waits = [[], [(0, 0.5)]]
    assert moved([1.0, 2.5], [1.0, 1.0], waits, [[0], [1]]) == [0.0, 1.5]


def test_a_gap_is_filled_if_it_is_long_enough():
    """Pass 2 of 1 s fits before pass 1, which waits for a message; pass 3 of 2 s does not. Both
    are less urgent.
    """
    seconds, lanes = [1.0, 4.0, 1.0, 2.0], [[0], [0], [0], [0]]
    waits = [[], [(0, 1.0)], [(0, 0.0)], [(0, 0.0)]]
    assert moved([1.0, 6.0, 7.0, 9.0], seconds, waits, lanes) == [0.0, 2.0, 1.0, 6.0]


def test_a_pass_takes_all_its_lanes_at_once():
    """Pass 2 runs on both lanes, which are free together after the longer of the others."""
    seconds, lanes = [1.0, 2.0, 1.0], [[0], [1], [0, 1]]
    waits = [[], [], [(0, 0.0)]]
    assert moved([1.0, 2.0, 3.0], seconds, waits, lanes) == [0.0, 0.0, 2.0]


def test_passes_of_no_length_stay_in_order():
    """Gradients of weights may take nothing."""
    seconds, lanes = [1.0, 0.0, 0.0, 1.0], [[0]] * 4
    waits = [[], [(0, 0.0)], [(1, 0.0)], [(2, 0.0)]]
    assert moved([1.0, 1.0, 1.0, 2.0], seconds, waits, lanes) == [0.0, 1.0, 1.0, 1.0]
