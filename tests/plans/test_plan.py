"""How plans are written for people."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.plans.plan import headline, ranges


@given(st.sets(st.integers(0, 40)))
def test_ranges_can_be_read_back(numbers):
    """Nothing is lost and nothing added."""
    read = set()
    for part in filter(None, ranges(sorted(numbers)).split(",")):
        first, _, last = part.partition("-")
        read |= set(range(int(first), int(last or first) + 1))
    assert read == numbers


@pytest.mark.parametrize(
    ("period_s", "end"),
    [
        (0.5, "peak 1.0 MiB"),
        (0.4, "; 400.00 ms each for steps in a row, begun before others have ended"),
        (0.6, "; 600.00 ms each for steps in a row, longer than one alone, as each reads its "
         "batch and shares cores and links with those before and after it"),
    ],
)  # fmt: skip
def test_steps_in_a_row_are_told_where_they_differ(period_s, end):
    """From a step alone of 0.5 s, with the reason."""
    assert headline(0.5, 0.25, 2**20, 8, period_s=period_s).endswith(end)
