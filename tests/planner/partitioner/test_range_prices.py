"""Prices of ranges: the numbers of single parts, for all ranges at once."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.cluster import Cluster, Level
from anabranch.cost import CostModel
from anabranch.graph.series_parallel import decompose, operators
from anabranch.planner.partitioner.chains import line
from anabranch.planner.partitioner.range_prices import INFINITE, RangePrices, RangeSizes
from anabranch.planner.toolkit.parts import Part, PartPrices
from anabranch.planner.toolkit.prices import (
    Bound,
    MicrobatchPrices,
    degrees,
)
from tests.planner.helpers import TWO_NODES, TWO_PROFILED, cost_model, sharded, two_priced
from tests.strategies import planning_profiles


@settings(max_examples=30, deadline=None)
@given(
    planning_profiles(7, series_parallel=False),
    st.sampled_from([1, 3, 4, 8]),
    st.integers(1, 3),
    st.integers(30, 200),
    st.booleans(),
    st.booleans(),
)
def test_ranges_agree_with_parts(profile, size, count, memory, tensor, recompute):
    """Any graph, every range of its order and mode: table and single price are the same."""
    profile = sharded(profile) if tensor else profile
    cost = cost_model(profile, 8, node=4, memory=memory, bandwidth=7.0, card=3.0, latency_s=0.5)
    common = MicrobatchPrices(
        cost,
        size * count,
        size,
        degrees(cost, size, 8),
        memory,
        cost.tensor_degrees,
        recompute,
        8,
    )
    parts = PartPrices(common)
    chain = line(cost, operators(decompose(cost.graph)))
    ranges = RangePrices(chain.row, RangeSizes([common]))
    n = len(chain.row.parts)
    for bound in (Bound(6.0), Bound(40.0), Bound(40.0, spread=False, reduce_s=2.0)):
        need = np.broadcast_to(ranges.need([bound], 4)[0], (4, n + 1, n + 1))
        for i in range(n):
            for j in range(i + 1, n + 1):
                for height in range(4):
                    expected = fewest(parts, chain.row.mask(i, j), bound, height)
                    assert need[height, j, i] == expected


def fewest(parts: PartPrices, mask: int, bound: Bound, height: int) -> int:
    for mode in parts.microbatch.modes:
        part = Part(mask, mode.replicas, mode.recompute, mode.tensor)
        period = parts.period_s(part) if bound.spread else parts.work_s(part)
        reduce_s = parts.reduce_s(part)
        within = period <= bound.period_s + 1e-9 and reduce_s <= bound.reduce_s
        if within and parts.headroom(part) >= height:
            return part.devices
    return INFINITE


@pytest.mark.parametrize("bound", [5.9, 6.0])
def test_bound_is_inclusive(bound):
    """Exactly the bound is within it: 2 samples of a take 6 s."""
    fast = Cluster("fast", "cpu", 10**5, (Level("node", 4, 1e9, 0.0),))
    chain = line(CostModel(TWO_PROFILED, fast), range(2))
    need = RangePrices(chain.row, RangeSizes([two_priced(2, cluster=fast).microbatch])).need(
        [Bound(bound)], 1
    )
    assert need[0, 0, 1, 0] == (1 if bound == 6.0 else 2)


def test_several_sizes_and_bounds_at_once():
    """Each bound is for one size: the tables are those of the sizes alone."""
    fast = Cluster("fast", "cpu", 10**5, (Level("node", 4, 1e9, 0.0),))
    chain = line(CostModel(TWO_PROFILED, fast), range(2))
    priced = [two_priced(size, cluster=fast).microbatch for size in (2, 8)]
    bounds = [Bound(6.0, at=0), Bound(12.1, at=1), Bound(24.0, at=1)]
    together = RangePrices(chain.row, RangeSizes(priced)).need(bounds, 1)
    alone = [
        RangePrices(chain.row, RangeSizes([priced[b.at]])).need([replace(b, at=0)], 1)
        for b in bounds
    ]
    assert (together == np.concatenate(alone)).all()
    # a takes 3 s per sample: 2 samples on one device, 8 samples on two and on one.
    assert together[:, 0, 1, 0].tolist() == [1, 2, 1]


def test_the_last_height_may_stand_for_greater_ones():
    """Memory for three micro-batches in flight: height 2 but not 5."""
    chain = line(CostModel(TWO_PROFILED, TWO_NODES, optimizer_factor=1.0), range(2))
    limited = MicrobatchPrices(CostModel(TWO_PROFILED, TWO_NODES, 1.0), 16, 1, (1,), 3730.0)
    ranges = RangePrices(chain.row, RangeSizes([limited]))
    # 900 bytes three times, once more for a gradient before it is added, and 100 to receive; 10 per
    # micro-batch in flight.
    assert int(ranges.headroom[0, 0, 0]) == 2
    assert ranges.need([Bound(1e9)], 3)[0, :, 1, 0].tolist() == [1]
    assert ranges.need([Bound(1e9)], 3, 5)[0, :, 1, 0].tolist() == [1, 1, INFINITE]
