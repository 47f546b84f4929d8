"""The search against the recurrence as the paper writes it."""

from __future__ import annotations

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from anabranch.cost import CostModel
from anabranch.graph.opgraph import Op, OpGraph, Value, bits
from anabranch.planner.piper.planner import least
from anabranch.planner.piper.prices import Choice, StagePrices
from anabranch.planner.piper.search import ROUNDING, Found
from anabranch.planner.piper.states import Pairs, Space, States
from anabranch.planner.toolkit.prices import Prices
from anabranch.profile.profile import OpCost, Profile
from tests.planner.helpers import cluster, cost_model
from tests.planner.piper.reference import Reference, rich_profiles, row
from tests.strategies import planning_profiles

EVERYTHING = 10**6


def searched(
    reference: Reference, *, exact: bool = False, tolerance: float = 0.0
) -> tuple[StagePrices, Found | None]:
    """What the search finds, and the prices it used."""
    cost, size = reference.cost, reference.size
    prices = Prices(cost, reference.batch_size, size, (), cost.cluster.memory_bytes)
    space = Space.of(cost, reference.downsets, EVERYTHING)
    stages = StagePrices(prices, space.states, reference.choices)
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
    choices = [
        Choice(replicas, tensor, recompute)
        for tensor in cost.tensor_degrees
        for replicas in (1, 2, 4)
        for recompute in (False, True)
        if replicas * tensor <= devices
    ]
    return Reference(cost, batch_size, 4, choices)


@pytest.mark.parametrize("exact", [False, True])
@settings(max_examples=120, deadline=None)
@given(
    profile=rich_profiles(),
    devices=st.sampled_from([1, 2, 3, 4, 8]),
    memory=st.one_of(st.integers(20, 90), st.just(10**9)),
    bandwidth=st.sampled_from([1.0, 8.0, 1e9]),
    batch_size=st.sampled_from([4, 8, 30]),
)
def test_finds_the_least_load(exact, profile, devices, memory, bandwidth, batch_size):
    """Any graph, shared parameters, tensor degrees, tight memory: the least load over all chains of
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


@settings(max_examples=100, deadline=None)
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
        choice = stages.choices[options.choice[i]]
        assert options.load_s[i] == pytest.approx(reference.load_s(mask, choice), abs=1e-12)
        assert reference.fits(mask, choice, len(chain) - 1 - place)


@settings(max_examples=50, deadline=None)
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


@settings(max_examples=50, deadline=None)
@given(profile=rich_profiles(), factor=st.floats(1, 3))
def test_a_known_load_changes_nothing(profile, factor):
    """The same least load from any bound above it."""
    reference = drawn_reference(profile, 4, 90, 8.0, 16)
    stages, found = searched(reference)
    if found is not None:
        space = Space.of(reference.cost, reference.downsets, EVERYTHING)
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
    choices = [Choice(1), Choice(1, recompute=True)]
    reference = Reference(cost, 64, 1, choices)
    stages, found = searched(reference)
    assert found is not None
    assert found.load_s == 3.0 + any(recompute)
    needs = [[10, 40], [14, 34], [13, 23], [12, 12]]
    chosen = [stages.choices[found.options.choice[i]] for i in found.chain(exact=False)]
    assert [choice.recompute for choice in chosen] == recompute
    assert all(plain <= memory or again for (_, plain), again in zip(needs, recompute, strict=True))


def test_pairs_are_all_nested_pairs():
    """A diamond's 6 downsets: 14 pairs of which one holds the other."""
    profile = diamond()
    states = States(cost_model(profile, 1), [0b0, 0b1, 0b11, 0b101, 0b111, 0b1111])
    pairs = states.nested(EVERYTHING)
    assert isinstance(pairs, Pairs)
    assert len(pairs) == 14
    masks = states.masks
    assert all(masks[a] & ~masks[b] == 0 for a, b in zip(pairs.lo, pairs.hi, strict=True))


def diamond():
    """a, then b and c, then d; each reads 1 byte per sample from each of those before."""
    values = (Value(0, (1, 2), 1), Value(1, (3,), 1), Value(2, (3,), 1))
    graph = OpGraph(tuple(Op(name) for name in "abcd"), values)
    costs = (OpCost((1.0,), (2.0,), 1),) * 4
    return Profile(graph, (1,), costs, "cpu", "measured", proportional=True)


@settings(max_examples=60, deadline=None)
@given(profile=rich_profiles())
def test_borders_follow_the_values(profile):
    """Between any two downsets: what enters, what comes back, what is held, counted by hand."""
    cost = cost_model(profile, 1)
    reference = Reference(cost, 8, 4, [])
    states = States(cost, reference.downsets)
    pairs = states.nested(EVERYTHING)
    borders, traffic = states.borders(pairs), states.traffic(pairs)
    own = [states.sums(each) for each in states.own_bytes]
    for at, (a, b) in enumerate(zip(pairs.lo.tolist(), pairs.hi.tolist(), strict=True)):
        ops = list(bits(states.masks[b] & ~states.masks[a]))
        enter, leave, gradients = cost.boundary_bytes(ops, 3)
        assert borders.enter[at] * 3 + borders.enter_fixed[at] == enter
        assert borders.gradients[at] * 3 + borders.gradients_fixed[at] == gradients
        assert borders.traffic[at] * 3 + borders.traffic_fixed[at] >= enter + leave
        assert borders.traffic[at] * (1 - 2e-6) <= traffic[at] <= borders.traffic[at]
        assert own[0][b] - own[0][a] + borders.tied[at] == cost.parameter_bytes(ops)
        trainable = cost.parameter_bytes(ops, trainable=True)
        assert own[1][b] - own[1][a] + borders.tied_trainable[at] == trainable
