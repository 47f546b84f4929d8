"""What profiles say of kept bytes."""

from __future__ import annotations

from anabranch.profile.profile import kept_per_sample


def test_kept_per_sample() -> None:
    """The slope between two counts, rounded up; what does not grow drops out."""
    assert kept_per_sample([100, 50, 7], [200, 50, 10], (2, 4)) == [50, 0, 2]
    assert kept_per_sample([9], [9], (2, 2)) == [5]
