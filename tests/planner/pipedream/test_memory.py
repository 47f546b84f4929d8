"""Plans in little memory against every plan that there is."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.planner.pipedream.recurrence import solve, solve_in_memory
from anabranch.planner.pipedream.terms import Terms, stages
from anabranch.planner.toolkit.assemble import fits
from anabranch.planner.toolkit.budget import Budget
from anabranch.planner.toolkit.prices import Part
from tests.planner.pipedream.reference import Reference, nodes, terms_for
from tests.strategies import planning_profiles


def budget() -> Budget:
    """Enough for small graphs."""
    return Budget("pipedream", 10**9, "raise option steps")


def fit(terms: Terms, pieces) -> bool:
    """Whether the stages fit as a row of stages holds them, by the prices of single stages."""
    masks = terms.states.sets
    parts = [
        Part(masks[v] & ~masks[u], len(devices))
        for u, v, devices in stages(pieces, [tier.size for tier in terms.tiers])
    ]
    row = {(s, s + 1) for s in range(len(parts) - 1)}
    return fits(terms.prices, parts, row)


@given(
    planning_profiles(5, series_parallel=False),
    st.integers(1, 6),
    st.sampled_from([2, 4, 8, 9]),
    st.integers(1, 4),
    st.integers(20, 120),
    st.booleans(),
    st.sampled_from([0.5, 2.0, 10.0]),
)
def test_equals_the_best_plan_that_fits(
    profile, devices, size, count, bytes_each, accumulate, bandwidth
):
    """Every row of stages by hand: the same least period within memory, in the fewest stages."""
    terms = terms_for(
        profile,
        nodes(devices, bandwidths=[bandwidth], memory=bytes_each),
        microbatch_size=size,
        batch_size=size * count,
        accumulate=accumulate,
    )
    reference = Reference(terms)
    periods = [
        (reference.period_s(pieces), len(pieces))
        for pieces in reference.plans()
        if reference.period_s(pieces) < math.inf and fit(terms, pieces)
    ]
    least = min((period for period, _ in periods), default=math.inf)
    found = solve_in_memory(terms, budget())
    assert (found is None) == (least == math.inf)
    if found is not None:
        assert reference.period_s(found) == pytest.approx(least, rel=1e-6)
        assert fit(terms, found)
        assert len(found) == min(count for period, count in periods if period <= least * (1 + 1e-9))


@given(planning_profiles(6), st.sampled_from([1, 4, 6]), st.booleans())
def test_is_the_recurrence_where_memory_is_ample(profile, devices, accumulate):
    """Two ways to the same value."""
    terms = terms_for(
        profile, nodes(devices), microbatch_size=8, batch_size=32, accumulate=accumulate
    )
    exact, found = solve(terms, budget()), solve_in_memory(terms, budget())
    assert (exact is None) == (found is None)
    if exact and found:
        value = Reference(terms).period_s
        assert value(found) == pytest.approx(value(exact), rel=1e-6)


@given(planning_profiles(6), st.integers(20, 80), st.integers(1, 40))
def test_more_memory_is_never_slower(profile, bytes_each, more):
    """Whatever fits into less fits into more."""
    terms = terms_for(profile, nodes(4), microbatch_size=4, batch_size=16)
    some, ample = (
        solve_in_memory(
            replace(terms, prices=replace(terms.prices, memory_bytes=memory_bytes)), budget()
        )
        for memory_bytes in (bytes_each, bytes_each + more)
    )
    if some is not None:
        assert ample is not None
        value = Reference(terms).period_s
        assert value(ample) <= value(some) * (1 + 1e-9)
