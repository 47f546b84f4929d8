"""Configurations, and what single stages cost in them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.planner.graphpipe.chains import line
from anabranch.planner.graphpipe.schedules import ENDLESS, Configuration, Schedules, configurations
from anabranch.planner.toolkit.prices import UNBOUNDED, MicrobatchPrices, Part
from tests.planner.helpers import TWO_PROFILED, cost_model
from tests.strategies import planning_profiles


def test_groups_up_to_the_batch():
    """Every size with k = 1, 2, 4, as long as the group fits."""
    found = [(c.microbatch_size, c.k) for c in configurations((1, 2, 4), 4)]
    assert found == [(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (4, 1)]


def test_samples_held_beyond_those_of_the_successor():
    """Table 2: of one size a micro-batch; of unlike ones 4 where 1 comes before 4, 4 - 1 + 4 where
    it comes behind.
    """
    chosen = (Configuration(1), Configuration(4))
    cost = cost_model(TWO_PROFILED, 2)
    prices = tuple(MicrobatchPrices(cost, 8, c.microbatch_size, (1,), 10**9) for c in chosen)
    schedules = Schedules(chosen, prices)
    assert schedules.more.tolist() == [[1, 4], [7, 4]]
    assert schedules.alone == (1, 4)


@given(
    planning_profiles(5, series_parallel=False),
    st.sampled_from([1, 2, 4]),
    st.integers(1, 3),
    st.integers(10, 60),
)
def test_tables_have_the_prices_of_parts(profile, size, count, memory):
    """Every range in every mode: the same period and memory as one stage alone."""
    cost = cost_model(profile, 4, memory=memory, bandwidth=7.0, latency_s=0.3)
    prices = MicrobatchPrices(
        cost, size * count, size, (1, 2, 4)[: size.bit_length()], memory, True
    )
    schedules = Schedules((Configuration(size),), (prices,))
    row = line(cost, range(len(cost.graph)), 64).row
    tps, rooms = schedules.tables(row, len(cost.graph))
    for start in range(len(cost.graph)):
        for stop in range(start + 1, len(cost.graph) + 1):
            for k, mode in enumerate(schedules.modes):
                part = Part(row.mask(start, stop), mode.replicas, mode.recompute)
                seconds = float(tps[0, k, start, stop]) * size
                assert seconds == pytest.approx(prices.part_period_s(part), rel=1e-12)
                room, headroom = int(rooms[0, k, start, stop]), prices.part_headroom(part)
                assert room == (ENDLESS if headroom == UNBOUNDED else (headroom + 1) * size)
