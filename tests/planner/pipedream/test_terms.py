"""The terms one by one, and where the stages of a plan are."""

from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.cluster import Cluster, Level
from anabranch.planner.pipedream.terms import PlannedSpan, flat, stages, tiers
from tests.planner.pipedream.reference import Reference, nodes, terms_for
from tests.strategies import planning_profiles


@given(
    planning_profiles(5, series_parallel=False),
    st.sampled_from([1, 5, 8, 12]),
    st.booleans(),
    st.integers(1, 6),
)
def test_every_term_equals_its_formula(profile, size, accumulate, copies):
    """Compute, all-reduce and transfers of every span, at both levels, for any copies."""
    terms = terms_for(
        profile, nodes(3, 2), microbatch_size=size, batch_size=3 * size, accumulate=accumulate
    )
    reference = Reference(terms)
    count = len(terms.states)
    compute = terms.compute_s(copies)
    for level in (0, 1):
        cut = terms.cut_s(level, copies)
        assert cut == pytest.approx([reference.cut_s(level, copies, s) for s in range(count)])
        for m in (1, 2, 3):
            reduced = np.broadcast_to(terms.reduce_s(level, copies, m), compute.shape)
            for u in range(count):
                for v in range(u + 1, count):
                    wanted = reference.reduce_s(level, copies, u, v, m)
                    assert reduced[u, v] == pytest.approx(wanted)
    for u in range(count):
        for v in range(u + 1, count):
            assert compute[u, v] == pytest.approx(reference.compute_s(copies, u, v))


def test_stages_of_copies_lie_across_the_components():
    """Nodes of 4; the first two hold copies of one pipeline of 3 and 1, the third another."""
    inner = (PlannedSpan(0, 2, 3), PlannedSpan(2, 5, 1))
    plan = (PlannedSpan(0, 5, 2, inner), PlannedSpan(5, 9, 1, (PlannedSpan(5, 9, 4),)))
    assert list(stages(plan, (4, 3))) == [
        (0, 2, (0, 1, 2, 4, 5, 6)),
        (2, 5, (3, 7)),
        (5, 9, (8, 9, 10, 11)),
    ]


def test_components_have_all_their_cards_and_devices_one():
    """Nodes of 8 with 8 cards of 50 GB/s; as one level of devices each has one."""
    nodes = Cluster.preset("dgx-h100:2x8")
    assert [level.bandwidth for level in tiers(nodes)] == [450e9, 400e9]
    assert [(level.size, level.bandwidth) for level in flat(nodes)] == [(16, 50e9)]


def test_levels_of_one_component_are_left_out():
    """DAPPLE's cluster B has nodes of one device; what lies above is on the slower link."""

    def seen(levels: Iterable[Level]) -> list[tuple[int, float]]:
        return [(level.size, level.bandwidth) for level in levels]

    assert seen(tiers(Cluster.preset("dapple-b:16"))) == [(16, 25e9 / 8)]
    assert seen(tiers(Cluster.preset("summit:1x4"))) == [(4, 45e9)]
    assert seen(tiers(Cluster.preset("summit:8x4"))) == [(4, 45e9), (8, 12.5e9)]
    assert seen(flat(Cluster.preset("summit:8x4"))) == [(32, 12.5e9)]
    assert [tier.size for tier in tiers(nodes(1, 1))] == [1]
