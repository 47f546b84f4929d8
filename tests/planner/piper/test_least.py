"""The search against the recurrence as the paper writes it."""

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from anabranch.cost import CostModel
from anabranch.planner.piper.planner import least
from anabranch.planner.piper.prices import DownsetPairs, DownsetPrices
from anabranch.planner.piper.search import BoundedPlans
from anabranch.planner.toolkit.prices import ROUNDING
from tests.planner.helpers import cluster, cost_model
from tests.planner.piper.reference import Reference, rich_profiles, row
from tests.strategies import planning_profiles

EVERYTHING = 10**6


def searched(
    reference: Reference, *, exact: bool = False, tolerance: float = 0.0
) -> tuple[DownsetPrices, BoundedPlans | None]:
    """What the search finds, and the prices it used."""
    space = DownsetPairs.of(reference.cost, reference.downsets, EVERYTHING)
    stages = DownsetPrices(reference.prices, space.downsets)
    return stages, least(stages, space, tolerance, exact=exact)


def drawn_reference(
    profile, devices: int, memory: int, bandwidth: float, batch_size: int
) -> Reference:
    """Micro-batches of 4 samples on nodes of up to 4 devices with slow links between them."""
    machines = cluster(
        devices,
        node=devices // 2 if devices in (4, 8) else None,
        memory=memory,
        bandwidth=bandwidth,
        card=bandwidth / 2,
        latency_s=0.25,
    )
    cost = CostModel(profile, machines, optimizer_factor=1.0)
    return Reference(cost, batch_size, 4, (1, 2, 4)[: devices.bit_length()])


@pytest.mark.parametrize("exact", [False, True])
@given(
    profile=rich_profiles(),
    devices=st.sampled_from([1, 2, 3, 4, 8]),
    memory=st.one_of(st.integers(20, 90), st.just(10**9)),
    bandwidth=st.sampled_from([1.0, 8.0, 1e9]),
    batch_size=st.sampled_from([4, 8, 30]),
)
def test_finds_the_least_load(exact, profile, devices, memory, bandwidth, batch_size):
    """Any graph, shared parameters, tight memory: the least load over all chains of
    nested downsets; in it, the fewest stages.
    """
    reference = drawn_reference(profile, devices, memory, bandwidth, batch_size)
    best = reference.best()
    if exact:
        best = {key: load for key, load in best.items() if key[0] == devices}
    _, found = searched(reference, exact=exact)
    event(f"feasible: {found is not None}")
    assert (found is not None) == bool(best)
    if found is None:
        return
    chain = found.chain(exact=exact)
    load = max(found.options.load_s[chain])
    assert load == pytest.approx(min(best.values()), rel=2e-9, abs=1e-12)
    near = load * ROUNDING
    assert len(chain) == min(stages for (_, stages), known in best.items() if known <= near)


@given(profile=rich_profiles(), devices=st.sampled_from([2, 4]), memory=st.sampled_from([40, 90]))
def test_prices_what_it_says(profile, devices, memory):
    """Each stage of the plan has the load and fits the memory that the cost model says."""
    reference = drawn_reference(profile, devices, memory, 8.0, 16)
    stages, found = searched(reference)
    if found is None:
        return
    chain, options = found.chain(exact=False), found.options
    assert int(options.lo[chain[0]]) == 0
    assert int(options.hi[chain[-1]]) == len(reference.downsets) - 1
    assert sum(options.devices[chain]) <= devices
    for place, i in enumerate(chain):
        mask = reference.downsets[options.hi[i]] & ~reference.downsets[options.lo[i]]
        mode = stages.modes[options.mode[i]]
        assert options.load_s[i] == pytest.approx(reference.load_s(mask, mode), abs=1e-12)
        assert reference.fits(mask, mode, len(chain) - 1 - place)


@given(profile=planning_profiles(6), tolerance=st.sampled_from([0.01, 0.1, 0.5]))
def test_stops_within_the_tolerance(profile, tolerance):
    """Never further from the least load than was allowed."""
    reference = drawn_reference(profile, 4, 90, 8.0, 16)
    _, closest = searched(reference)
    _, near = searched(reference, tolerance=tolerance)
    assert (closest is None) == (near is None)
    if closest is not None and near is not None:
        assert closest.load_s / ROUNDING <= near.load_s
        assert near.load_s <= closest.load_s * (1 + tolerance) * ROUNDING


@given(profile=rich_profiles(), factor=st.floats(1, 3))
def test_a_known_load_changes_nothing(profile, factor):
    """The same least load from any bound above it."""
    reference = drawn_reference(profile, 4, 90, 8.0, 16)
    stages, found = searched(reference)
    if found is not None:
        space = DownsetPairs.of(reference.cost, reference.downsets, EVERYTHING)
        again = least(stages, space, 0.0, bound_s=found.load_s * factor)
        assert again is not None
        assert again.load_s == pytest.approx(found.load_s, rel=2e-9)


@pytest.mark.parametrize(
    ("memory", "recompute"),
    [
        (40, [False, False, False, False]),
        (39, [True, False, False, False]),
        (33, [True, True, False, False]),
        (22, [True, True, True, False]),
    ],
)
def test_memory_follows_the_place_in_the_line(memory, recompute):
    """4 operators that keep 10 bytes, one per device, 4 s in the first with recomputation.

    From the last stage on 1, 2, 3 and 4 micro-batches are in flight, each with the byte that
    entered, and one more is received ahead: 12, 23, 34 and (nothing enters) 40 bytes. With
    recomputation 12, 13, 14 and 10.
    """
    cost = cost_model(row(4, 10), 4, memory=memory)
    reference = Reference(cost, 64, 1, (1,))
    stages, found = searched(reference)
    assert found is not None
    assert found.load_s == 3.0 + any(recompute)
    needs = [[10, 40], [14, 34], [13, 23], [12, 12]]
    chosen = [stages.modes[found.options.mode[i]] for i in found.chain(exact=False)]
    assert [mode.recompute for mode in chosen] == recompute
    assert all(plain <= memory or again for (_, plain), again in zip(needs, recompute, strict=True))
