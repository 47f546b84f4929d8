"""The recurrence in arrays against the recurrence as it is written."""

from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.errors import BudgetError
from anabranch.planner.pipedream.recurrence import solve
from anabranch.planner.pipedream.terms import flat, stages
from anabranch.planner.toolkit.budget import Budget
from anabranch.planner.toolkit.downsets import downsets
from anabranch.profile.profile import OpCost, Profile
from tests.planner import shapes
from tests.planner.pipedream.reference import INFINITE, Reference, nodes, terms_for
from tests.strategies import planning_profiles

SIZES = st.sampled_from([(1,), (4,), (5,), (2, 2), (3, 2), (1, 4), (2, 1, 3), (2, 2, 2), (1, 1)])
SPEEDS = st.tuples(*[st.sampled_from([0.2, 1.0, 10.0])] * 3)


def budget(steps: float = 10**9) -> Budget:
    """Enough for small graphs."""
    return Budget("pipedream", steps, "raise option steps")


@given(
    planning_profiles(6, series_parallel=False),
    SIZES,
    st.sampled_from([1, 2, 3, 5, 8]),
    st.integers(1, 4),
    st.booleans(),
    st.booleans(),
    st.sampled_from([1, 2, 99]),
    SPEEDS,
)
def test_equals_the_recurrence(profile, sizes, size, count, accumulate, antichains, limit, speeds):
    """Any levels, counts and graph, in a row or by its antichains: the same value, to rounding."""
    terms = terms_for(
        profile,
        nodes(*sizes, bandwidths=speeds[: len(sizes)]),
        microbatch_size=size,
        batch_size=size * count,
        accumulate=accumulate,
        states=downsets(profile.graph, 10**5) if antichains else None,
        max_replicas=limit,
    )
    reference = Reference(terms)
    found = solve(terms, budget())
    least = reference.least_s()
    if found is None:
        assert least == INFINITE
        return
    assert reference.period_s(found) == pytest.approx(least)
    # The plan fills the cluster.
    placed = [devices for _, _, devices in stages(found, [tier.size for tier in terms.tiers])]
    assert sorted(d for devices in placed for d in devices) == list(range(terms.devices))


@given(planning_profiles(5), st.sampled_from([(4,), (2, 2), (3, 2), (2, 2, 2)]), SPEEDS)
def test_is_the_papers_formula_where_time_is_proportional(profile, sizes, speeds):
    """T^k = 1/m max(A^(k-1), 2(m-1) w / B_k), on time per mini-batch and whole mini-batches."""
    once = tuple(OpCost(c.forward_s[:1], c.backward_s[:1], c.kept_bytes) for c in profile.costs)
    linear = Profile(profile.graph, (1,), once, device="cpu", source="imported", proportional=True)
    cluster = nodes(*sizes, bandwidths=speeds[: len(sizes)])
    terms = terms_for(linear, cluster, microbatch_size=24, batch_size=24)
    reference = Reference(terms)

    @cache
    def a(k: int, u: int, v: int, m: int) -> float:
        if k == 0:
            return reference.compute_s(1, u, v)
        least = t(k, u, v, m)
        for s in reference.between(u, v):
            for n in range(1, m):
                cut = reference.cut_s(k - 1, 1, s)
                least = min(least, max(a(k, u, s, m - n), cut, t(k, s, v, n)))
        return least

    @cache
    def t(k: int, u: int, v: int, m: int) -> float:
        inside = a(k - 1, u, v, terms.tiers[k - 2].size if k > 1 else 1)
        weights = profile_weights(u, v)
        return max(inside, 2 * (m - 1) * weights / terms.tiers[k - 1].bandwidth) / m

    def profile_weights(u: int, v: int) -> int:
        return terms.prices.cost.stage_parameter_bytes(reference.ops(u, v)).trainable

    levels = len(terms.tiers)
    wanted = a(levels, 0, len(profile.graph), terms.tiers[-1].size)
    found = solve(terms, budget())
    assert found is not None
    assert reference.period_s(found) == pytest.approx(wanted)


@given(planning_profiles(6, series_parallel=False), SIZES, st.booleans())
def test_antichains_lose_nothing(profile, sizes, accumulate):
    """A row is one way through the states of the graph, so the graph's own are never slower."""
    common = {"microbatch_size": 8, "batch_size": 16, "accumulate": accumulate}
    in_row = terms_for(profile, nodes(*sizes), **common)
    any_way = terms_for(profile, nodes(*sizes), states=downsets(profile.graph, 10**5), **common)
    row, graph = solve(in_row, budget()), solve(any_way, budget())
    if row is not None:
        assert graph is not None
        least = Reference(in_row).period_s(row)
        assert Reference(any_way).period_s(graph) <= least * (1 + 1e-12)


@given(planning_profiles(6), st.sampled_from([(2, 2), (2, 3), (2, 2, 2)]))
def test_one_level_of_the_same_speed_is_no_slower(profile, sizes):
    """Levels only forbid: without transfers and parameters one level has every plan of several."""
    graph = replace(
        profile.graph,
        values=tuple(replace(v, nbytes=0) for v in profile.graph.values),
        parameters=tuple(replace(p, nbytes=0) for p in profile.graph.parameters),
    )
    terms = terms_for(replace(profile, graph=graph), nodes(*sizes), microbatch_size=8, batch_size=8)
    level = replace(terms, tiers=flat(terms.prices.cost.cluster))
    many, one = solve(terms, budget()), solve(level, budget())
    if many is not None:
        assert one is not None
        assert Reference(level).period_s(one) <= Reference(terms).period_s(many) * (1 + 1e-12)


def test_ends_where_the_meter_does():
    """Both numbers and a way on."""
    terms = terms_for(shapes.candle_uno(), nodes(4), microbatch_size=8, batch_size=8)
    with pytest.raises(BudgetError, match=r"budget is 1e\+02; raise option steps"):
        solve(terms, budget(100))
