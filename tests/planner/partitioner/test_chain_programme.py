"""Fewest devices for many bounds and caps at once, against every plan one by one."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.planner.graphpipe import GraphPipe
from anabranch.planner.partitioner.chain_programme import ChainProgramme
from anabranch.planner.partitioner.chains import build
from anabranch.planner.partitioner.limits import SEARCH
from anabranch.planner.partitioner.range_prices import INFINITE
from anabranch.planner.partitions import partitions
from anabranch.planner.toolkit.parts import Part, PartPrices, edges, heights
from anabranch.planner.toolkit.prices import Bound
from tests.planner.helpers import cost_model, expressible
from tests.strategies import planning_profiles


def fewest(prices: PartPrices, masks: tuple[int, ...], period_s: float, cap: int) -> int:
    """Devices that these stages need within a period and a height; ``INFINITE`` if none do."""
    height = heights(len(masks), edges(prices, [Part(mask, 1) for mask in masks]))
    if max(height) > cap:
        return INFINITE
    total = 0
    for mask, h in zip(masks, height, strict=True):
        good = [
            part.devices
            for mode in prices.microbatch.modes
            for part in [Part(mask, mode.replicas, mode.recompute, mode.tensor)]
            if prices.period_s(part) <= period_s and prices.headroom(part) >= h
        ]
        total += min(good, default=INFINITE)
    return min(total, INFINITE)


@settings(max_examples=60, deadline=None)
@given(
    planning_profiles(6),
    st.sampled_from([2, 4]),
    st.integers(1, 3),
    st.sampled_from([40, 10**9]),
    st.booleans(),
    st.lists(st.integers(3, 60), min_size=1, max_size=3, unique=True),
)
def test_fewest_devices(profile, size, count, memory, recompute, periods):
    """For every bound and cap the best expressible plan; reading it gives as many devices.

    Where memory is short nothing is trained: a stage that takes parts of a block has room for the
    largest gradient of each part, so that it may seem to need a little more than it does.
    """
    if memory == 40:
        frozen = tuple(replace(p, trainable=False) for p in profile.graph.parameters)
        profile = replace(profile, graph=replace(profile.graph, parameters=frozen))
    cost = cost_model(profile, 8, memory=memory)
    problem = GraphPipe(recompute=recompute).problem(cost, size * count)
    prices = problem.prices(size)
    single = PartPrices(prices)
    everything = {tuple(sorted(masks)): masks for masks, _ in partitions(cost)}
    chain = build(cost, problem.tree)
    plans = [everything[tuple(sorted(masks))] for masks in set(expressible(chain))]
    reach = ChainProgramme(chain, [prices], limit=8)
    caps = list(range(reach.heights))
    bounds = [Bound(float(period) + 1e-6) for period in sorted(periods)]
    found = reach.solve(bounds, caps)
    unlimited = reach.solve(bounds)
    light = reach.lightly(bounds)
    for t, bound in enumerate(bounds):
        for u, cap in enumerate(caps):
            least = min(fewest(single, masks, bound.period_s, cap) for masks in plans)
            devices = int(found.devices[t, u])
            assert devices == least if least <= 8 else devices > 8
            if least <= 8:
                parts = found.parts(t, u)
                assert sum(part.devices for part in parts) == least
                assert sum(part.mask for part in parts) == (1 << len(cost.graph)) - 1
        # No plan has more stages on a path than the last cap allows.
        assert min(9, int(unlimited.devices[t, 0])) == min(9, int(found.devices[t, -1]))
        assert light.devices[t, 0] <= unlimited.devices[t, 0]


@settings(max_examples=20, deadline=None)
@given(planning_profiles(8), st.lists(st.integers(3, 90), min_size=2, max_size=4, unique=True))
def test_bounds_do_not_mix(profile, periods):
    """Two sizes, several bounds: together the same as one at a time."""
    cost = cost_model(profile, 6, bandwidth=9.0)
    problem = GraphPipe().problem(cost, 8)
    prices = [problem.prices(size) for size in (2, 4)]
    reach = ChainProgramme(build(cost, problem.tree), prices, limit=6)
    bounds = [Bound(float(p), at=i % 2) for i, p in enumerate(sorted(periods))]
    for solve in (reach.lightly, reach.solve):
        together = solve(bounds)
        for t, bound in enumerate(bounds):
            alone = solve([bound])
            assert min(7, int(together.devices[t, 0])) == min(7, int(alone.devices[0, 0]))


@pytest.mark.parametrize("heights", [2, 3])
def test_many_heights_are_taken_for_the_greatest(monkeypatch, heights):
    """A row of ten that is ten deep: memory is then that of the greatest height, never less."""
    from anabranch.planner.partitioner import chain_programme as module
    from tests.planner import shapes

    profile = shapes.towers("row", 1, 0, layers=8, top=0)
    cost = cost_model(profile, 10, memory=2 * 10**9)
    problem = GraphPipe(max_replicas=1, recompute=False).problem(cost, 4096)
    exact = ChainProgramme(build(cost, problem.tree), [problem.prices(64)], limit=10)
    monkeypatch.setattr(module, "SEARCH", replace(SEARCH, most_heights=heights))
    bounds = [Bound(float("inf"))]
    limited = exact.solve(bounds)
    monkeypatch.undo()
    assert limited.devices[0, 0] >= exact.solve(bounds).devices[0, 0]
    if limited.devices[0, 0] <= 10:
        assembled = problem.assembler(64).arrange(limited.parts(0))
        prices = PartPrices(problem.prices(64))
        height = heights_of(*assembled)
        assert all(prices.headroom(p) >= h for p, h in zip(assembled[0], height, strict=True))


def heights_of(parts: list[Part], pairs: set[tuple[int, int]]) -> list[int]:
    """Longest distance of each to the sink."""
    return heights(len(parts), pairs)
