"""How plans are written for people."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from anabranch.plans.plan import ranges


@given(st.sets(st.integers(0, 40)))
def test_ranges_can_be_read_back(numbers):
    """Nothing is lost and nothing added."""
    read = set()
    for part in filter(None, ranges(sorted(numbers)).split(",")):
        first, _, last = part.partition("-")
        read |= set(range(int(first), int(last or first) + 1))
    assert read == numbers
