"""Stages on exactly all devices."""

from __future__ import annotations

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from anabranch.planner.partitioner.fill import Choice, exactly
from anabranch.planner.toolkit.parts import Part
from tests.planner.toolkit.test_assemble import assembler, stages

CHOICES = st.lists(
    st.dictionaries(st.integers(1, 5), st.integers(0, 9), min_size=1, max_size=4).map(
        lambda ways: [Choice(d, float(p), Part(1, d)) for d, p in ways.items()]
    ),
    min_size=1,
    max_size=4,
)


@given(CHOICES, st.integers(1, 12))
def test_the_least_longest_period_on_exactly_all_devices(choices, total):
    """As all combinations, one by one."""
    every = [
        max(c.period_s for c in way)
        for way in product(*choices)
        if sum(c.devices for c in way) == total
    ]
    found = exactly(choices, total)
    if not every:
        assert found is None
        return
    assert found is not None
    assert sum(part.devices for part in found) == total
    chosen = [
        next(c for c in each if c.part == part) for each, part in zip(choices, found, strict=True)
    ]
    assert max(c.period_s for c in chosen) == min(every)


def test_uneven_numbers_of_replicas():
    """3 operators, 7 devices, micro-batches of 3 samples: 3 stages of no more than 3 replicas."""
    found = assembler([4, 4, 4], 7, size=3).assemble([Part(0b111, 1)])
    assert sorted(stages(found)) == ["1 x2", "1 x2", "1 x3"]
    assert assembler([4, 4, 4], 10, size=3).assemble([Part(0b111, 1)]) is None


def test_cuts_a_stage_that_two_would_share_less_well():
    """Two stages of 2 replicas at most on 5 devices: the longer one is cut for the fifth."""
    parts = [Part(0b0111, 2), Part(0b1000, 2)]
    found = assembler([2, 2, 2, 1], 5, size=2).assemble(parts)
    assert sum(int(text[-1]) for text in stages(found)) == 5
