"""The line through the seconds of a small and of a large message."""

import pytest

from anabranch.calibration.messages import SIZES, _line


def test_a_line_goes_through_both_sizes():
    """Half a second per byte and 3 s besides; noise never makes a larger message quicker."""
    fixed_s, byte_s = _line(*(3.0 + n / 2 for n in SIZES))
    assert (fixed_s, byte_s) == (pytest.approx(3.0), pytest.approx(0.5))
    assert _line(2.0, 1.0) == (2.0, 0.0)
