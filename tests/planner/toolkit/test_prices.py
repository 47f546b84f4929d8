"""The period and the memory of a stage, by hand, and the same from the tables of ranges."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.cluster import Cluster, Level
from anabranch.cost import CostModel
from anabranch.cost.memory import DeviceMemory
from anabranch.graph.opgraph import Op, OpGraph, Parameter, Value
from anabranch.graph.series_parallel import decompose, operators
from anabranch.planner.partitioner.chains import line
from anabranch.planner.partitioner.range_prices import INFINITE, RangePrices, Sizes
from anabranch.planner.toolkit.parts import Part, PartPrices
from anabranch.planner.toolkit.prices import UNBOUNDED, Bound, Prices, degrees, microbatch_sizes
from anabranch.profile.profile import OpCost, Profile
from tests.planner.helpers import cost_model, sharded
from tests.strategies import planning_profiles

#  a --100 bytes per sample--> b;   1 s forward and 2 s backward per sample, 900 bytes of weights
GRAPH = OpGraph(
    (Op("a", ("a.w",)), Op("b", ("b.w",))),
    (Value(0, (1,), 100),),
    (Parameter("a.w", 900), Parameter("b.w", 900)),
)
PROFILE = Profile(
    GRAPH,
    (1, 2, 4, 8),
    tuple(OpCost((1.0, 2.0, 4.0, 8.0), (2.0, 4.0, 8.0, 16.0), 10) for _ in range(2)),
    device="cpu",
    source="measured",
)
NODES = Cluster("2x2", "cpu", 10**5, (Level("node", 2, 100.0, 0.0), Level("net", 2, 50.0, 1.0)))


def prices(size: int = 4, *, cluster: Cluster = NODES, batch_size: int = 16) -> PartPrices:
    cost = CostModel(PROFILE, cluster, optimizer_factor=1.0)
    return PartPrices(Prices(cost, batch_size, size, (1, 2, 4), cluster.memory_bytes))


def test_compute_is_the_period_where_links_are_fast():
    """4 samples on one device: 4 * (1 + 2) s."""
    fast = Cluster("fast", "cpu", 10**5, (Level("node", 4, 1e9, 0.0),))
    assert prices(cluster=fast).period_s(Part(0b01, 1)) == 12.0


def test_replicas_share_the_card_of_their_node():
    """Micro-batches of 8. One device sends 800 bytes at 50 per s; two of one node as much together.

    With four replicas each card has two of them, with 200 bytes each: 8 s, and compute is 6 s. The
    all-reduce of 900 bytes over both nodes is 2 * 3/4 * 900 / 50 + 2 * 3 * 1 = 33 s, half of it per
    micro-batch. Within a node it is 2 * 1/2 * 900 / 100 = 9 s.
    """
    assert prices(8).period_s(Part(0b01, 1)) == 24.0  # compute; 16 s of traffic
    assert prices(8).period_s(Part(0b01, 2)) == 16.0 + 9.0 / 2
    assert prices(8).period_s(Part(0b01, 4)) == 8.0 + 33.0 / 2


def test_gradients_count_in_the_other_direction():
    """b receives 100 bytes per sample and sends as many back; each direction counts alone."""
    assert prices(8).period_s(Part(0b10, 2)) == prices(8).period_s(Part(0b01, 2))


def test_everything_in_one_stage_sends_nothing():
    """The whole model on four devices: 2 samples, 12 s; 1800 bytes reduced: 60 s over 2."""
    assert prices(8).period_s(Part(0b11, 4)) == 12.0 + 60.0 / 2


def test_uneven_replicas_cost_what_the_fullest_does():
    """5 samples on 2 devices: 3 on the fuller."""
    assert prices(5).compute_s(Part(0b01, 2)) == (3.0, 6.0)


def test_headroom():
    """1000 bytes, 100 fixed, 200 per micro-batch: 4 in flight, so height 3.

    With 4 micro-batches in all it fits at any height; if nothing fits, at none.
    """
    base = prices().prices
    for size, expected in ((2, 3), (4, UNBOUNDED), (8, UNBOUNDED)):
        some = Prices(base.cost, 16, size, (1,), 1000.0)
        assert some.headroom(DeviceMemory(100, 200, 0)) == expected
    assert base.headroom(DeviceMemory(2e5, 1, 0)) == -1
    assert base.headroom(DeviceMemory(10, 0, 0)) == UNBOUNDED


def test_degrees():
    """Powers of two with a sample each and a count that was profiled."""
    cost = CostModel(PROFILE, NODES)
    assert degrees(cost, 8, 4) == (1, 2, 4)
    assert degrees(cost, 2, 4) == (1, 2)
    assert degrees(cost, 16, 32) == (2, 4, 8, 16)
    assert degrees(cost, 3, 1) == (1,)


def test_microbatch_sizes():
    """Powers of two, and the batch itself."""
    assert microbatch_sizes(8) == (1, 2, 4, 8)
    assert microbatch_sizes(6) == (1, 2, 4, 6)
    assert microbatch_sizes(1) == (1,)


@settings(max_examples=60, deadline=None)
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
    common = Prices(
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
    ranges = RangePrices(chain.row, Sizes([common]))
    n = len(chain.row.parts)
    for bound in (Bound(6.0), Bound(40.0), Bound(40.0, spread=False, reduce_s=2.0)):
        need = np.broadcast_to(ranges.need([bound], 4)[0], (4, n + 1, n + 1))
        for i in range(n):
            for j in range(i + 1, n + 1):
                for height in range(4):
                    expected = fewest(parts, chain.row.mask(i, j), bound, height)
                    assert need[height, j, i] == expected


def fewest(parts: PartPrices, mask: int, bound: Bound, height: int) -> int:
    for mode in parts.prices.modes:
        part = Part(mask, mode.replicas, mode.recompute, mode.tensor)
        period, reduce_s = parts.period_s(part), parts.reduce_s(part)
        if not bound.spread:
            period -= reduce_s / parts.prices.num_microbatches
        within = period <= bound.period_s + 1e-9 and reduce_s <= bound.reduce_s
        if within and parts.headroom(part) >= height:
            return part.devices
    return INFINITE


def test_tied_parameters_count_once_in_a_range():
    """a and c share 900 bytes: a range with both has them once, apart each has its own."""
    ops = (Op("a", ("w",)), Op("b"), Op("c", ("w",)))
    graph = OpGraph(ops, (Value(0, (1,), 1), Value(1, (2,), 1)), (Parameter("w", 900),))
    costs = tuple(OpCost((1.0,), (1.0,), 0) for _ in ops)
    cost = CostModel(Profile(graph, (1,), costs, device="cpu", source="measured"), NODES)
    reduced = line(cost, range(3)).row.matrices().trainable
    assert [reduced[0, 1], reduced[1, 2], reduced[2, 3]] == [900, 0, 900]
    assert [reduced[0, 2], reduced[0, 3], reduced[1, 3]] == [900, 900, 900]


@pytest.mark.parametrize("bound", [5.9, 6.0])
def test_bound_is_inclusive(bound):
    """Exactly the bound is within it: 2 samples of a take 6 s."""
    fast = Cluster("fast", "cpu", 10**5, (Level("node", 4, 1e9, 0.0),))
    chain = line(CostModel(PROFILE, fast), range(2))
    need = RangePrices(chain.row, Sizes([prices(2, cluster=fast).prices])).need([Bound(bound)], 1)
    assert need[0, 0, 1, 0] == (1 if bound == 6.0 else 2)


def test_modes():
    """Fewest devices first, the plainest first; groups of two on at most four devices."""
    cost = CostModel(sharded(PROFILE), NODES)
    some = Prices(cost, 16, 4, (1, 2, 4), 1e9, (1, 2), recompute=True, max_devices=4)
    assert [(m.replicas, m.tensor, m.recompute) for m in some.modes] == [
        (1, 1, False),
        (1, 1, True),
        (2, 1, False),
        (1, 2, False),
        (2, 1, True),
        (1, 2, True),
        (4, 1, False),
        (2, 2, False),
        (4, 1, True),
        (2, 2, True),
    ]


def test_several_sizes_and_bounds_at_once():
    """Each bound is for one size: the tables are those of the sizes alone."""
    fast = Cluster("fast", "cpu", 10**5, (Level("node", 4, 1e9, 0.0),))
    chain = line(CostModel(PROFILE, fast), range(2))
    each = [prices(size, cluster=fast).prices for size in (2, 8)]
    bounds = [Bound(6.0, at=0), Bound(12.1, at=1), Bound(24.0, at=1)]
    together = RangePrices(chain.row, Sizes(each)).need(bounds, 1)
    alone = [
        RangePrices(chain.row, Sizes([each[b.at]])).need([replace(b, at=0)], 1) for b in bounds
    ]
    assert (together == np.concatenate(alone)).all()
    # a takes 3 s per sample: 2 samples on one device, 8 samples on two and on one.
    assert together[:, 0, 1, 0].tolist() == [1, 2, 1]


def test_the_last_height_may_stand_for_greater_ones():
    """Memory for three micro-batches in flight: height 2 but not 5."""
    chain = line(CostModel(PROFILE, NODES, optimizer_factor=1.0), range(2))
    limited = Prices(CostModel(PROFILE, NODES, 1.0), 16, 1, (1,), 2830.0)
    ranges = RangePrices(chain.row, Sizes([limited]))
    # 900 bytes three times and 100 to receive; 10 per micro-batch in flight.
    assert int(ranges.headroom[0, 0, 0]) == 2
    assert ranges.need([Bound(1e9)], 3)[0, :, 1, 0].tolist() == [1]
    assert ranges.need([Bound(1e9)], 3, 5)[0, :, 1, 0].tolist() == [1, 1, INFINITE]
