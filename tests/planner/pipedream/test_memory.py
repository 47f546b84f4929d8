"""Plans in little memory against every plan that there is."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.graph.opgraph import Op, OpGraph, Parameter, Value
from anabranch.planner.pipedream import memory, recurrence
from anabranch.planner.pipedream.terms import Terms, stages
from anabranch.planner.toolkit.budget import Budget
from anabranch.planner.toolkit.parts import Part, PartPrices, fits
from anabranch.profile.profile import OpCost, Profile
from tests.planner.pipedream.reference import Reference, nodes, terms_for
from tests.strategies import planning_profiles

MANY = 10**9


def fit(terms: Terms, pieces) -> bool:
    """Whether the stages fit as a row of stages holds them, by the prices of single stages."""
    masks = terms.states.sets
    parts = [
        Part(masks[v] & ~masks[u], len(devices))
        for u, v, devices in stages(pieces, [tier.size for tier in terms.tiers])
    ]
    row = {(s, s + 1) for s in range(len(parts) - 1)}
    return fits(PartPrices(terms.prices), parts, row)


@settings(max_examples=50, deadline=None)
@given(
    planning_profiles(5, series_parallel=False),
    st.sampled_from([(1,), (4,), (2, 2), (3, 2), (2, 3), (2, 2, 2)]),
    st.sampled_from([2, 4, 8, 9]),
    st.integers(1, 4),
    st.integers(20, 120),
    st.booleans(),
    st.sampled_from([0.5, 2.0, 10.0]),
)
def test_equals_the_best_plan_that_fits(
    profile, sizes, size, count, bytes_each, accumulate, bandwidth
):
    """Every pipeline inside every level, by hand: the same least period within memory."""
    terms = terms_for(
        profile,
        nodes(*sizes, bandwidths=[bandwidth] * len(sizes), memory=bytes_each),
        microbatch_size=size,
        batch_size=size * count,
        accumulate=accumulate,
    )
    periods = [
        (terms.period_s(pieces), pieces)
        for pieces in Reference(terms).plans()
        if terms.period_s(pieces) < math.inf and fit(terms, pieces)
    ]
    least = min((period for period, _ in periods), default=None)
    lower = recurrence.solve(terms, Budget("pipedream", MANY, "raise option steps"))
    found = memory.solve(
        terms, Budget("pipedream", MANY, "raise option steps"), lower[0] if lower else 0.0, 1e-9
    )
    if least is None:
        assert found is None
        return
    assert found is not None
    value, pieces = found
    assert value == pytest.approx(least, rel=1e-6)
    assert value == terms.period_s(pieces)
    assert fit(terms, pieces)
    # Of the plans at that period it has the fewest stages.
    sizes = [tier.size for tier in terms.tiers]
    alike = [plan for period, plan in periods if period <= value * (1 + 1e-6)]
    assert len(list(stages(pieces, sizes))) == min(len(list(stages(p, sizes))) for p in alike)


def test_no_cut_that_is_too_slow_inside_a_component():
    """Four layers that need a device each; the links inside the nodes are the slower ones, and
    what crosses the first and the third cut takes 20 s there and back.
    """
    n = 4
    graph = OpGraph(
        tuple(Op(f"layer{i}", (f"w{i}",)) for i in range(n)),
        tuple(Value(i, (i + 1,), nbytes) for i, nbytes in enumerate((10, 1, 10))),
        tuple(Parameter(f"w{i}", 100) for i in range(n)),
    )
    costs = tuple(OpCost((1.0,), (2.0,), 0) for _ in range(n))
    profile = Profile(graph, (1,), costs, device="cpu", source="imported", proportional=True)
    cluster = nodes(2, 2, bandwidths=(1.0, 1.0), memory=500)
    terms = terms_for(profile, cluster, microbatch_size=1, batch_size=1)
    found = memory.solve(
        terms, Budget("pipedream", MANY, "raise option steps"), terms.ideal_s(), 1e-9
    )
    assert found is not None
    assert found[0] == 20
    assert [piece.copies for piece in found[1]] == [1, 1]
    assert [[inner.stop for inner in piece.inside] for piece in found[1]] == [[1, 2], [3, 4]]


@settings(max_examples=30, deadline=None)
@given(planning_profiles(6), st.sampled_from([(4,), (2, 2), (3, 2)]), st.booleans())
def test_is_the_recurrence_where_memory_is_ample(profile, sizes, accumulate):
    """Two ways to the same value."""
    terms = terms_for(
        profile, nodes(*sizes), microbatch_size=8, batch_size=32, accumulate=accumulate
    )
    exact = recurrence.solve(terms, Budget("pipedream", MANY, "raise option steps"))
    found = memory.solve(
        terms, Budget("pipedream", MANY, "raise option steps"), terms.ideal_s(), 1e-9
    )
    assert (exact is None) == (found is None)
    if exact and found:
        assert found[0] == pytest.approx(exact[0], rel=1e-6)


@settings(max_examples=30, deadline=None)
@given(planning_profiles(6), st.integers(20, 80), st.integers(1, 40))
def test_more_memory_is_never_slower(profile, bytes_each, more):
    """On two levels, to the tolerance of the search."""
    terms = terms_for(profile, nodes(2, 2), microbatch_size=4, batch_size=16)
    some, ample = (
        memory.solve(
            replace(terms, prices=replace(terms.prices, memory_bytes=memory_bytes)),
            Budget("pipedream", MANY, "raise option steps"),
            terms.ideal_s(),
            1e-9,
        )
        for memory_bytes in (bytes_each, bytes_each + more)
    )
    if some is not None:
        assert ample is not None
        assert ample[0] <= some[0] * (1 + 1e-6)
