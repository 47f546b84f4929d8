"""The slowdown from what ranks were seen to do."""

import pytest

from anabranch.calibration.side_by_side import slowdown


def test_the_slowest_neighbour_counts():
    """Two ranks take up to 1.2 times as long, four 1.6 times, so three are taken to be between;
    round by round, so that a machine that is twice as slow in the second does not matter.
    """
    seen = [
        {1: [1.0, 2.0], 2: [1.1, 2.2], 4: [1.6, 3.0]},
        {1: [], 2: [1.2, 2.4], 4: [1.25, 2.5]},
        {1: [], 2: [], 4: [1.5, 3.2]},
        {1: [], 2: [], 4: [1.5, 3.0]},
    ]
    assert slowdown(seen) == pytest.approx((1.0, 1.2, 1.4, 1.6))


def test_a_slowdown_never_falls():
    """Noise may say that two are faster than one alone."""
    assert slowdown([{1: [1.0], 2: [0.9]}, {1: [], 2: [0.9]}]) == (1.0, 1.0)
