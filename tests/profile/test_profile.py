"""What profiles say of kept bytes."""

from __future__ import annotations

from anabranch.profile.profile import bytes_per_sample


def test_bytes_per_sample() -> None:
    """The slope between two counts, rounded up; what does not grow drops out."""
    assert bytes_per_sample([100, 50, 7], [200, 50, 10], (2, 4)) == [50, 0, 2]
    assert bytes_per_sample([9], [9], (2, 2)) == [5]
