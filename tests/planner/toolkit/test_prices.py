"""Modes, numbers of replicas, micro-batch sizes and heights that fit memory."""

import numpy as np

from anabranch.cluster import Cluster, Level
from anabranch.cost import CostModel
from anabranch.cost.footprint import Border, ParameterBytes, StageFootprint, Traffic
from anabranch.planner.toolkit.prices import UNBOUNDED, MicrobatchPrices, Part, period_s, traffic_s
from anabranch.planner.toolkit.problem import Problem
from tests.planner import shapes
from tests.planner.helpers import TWO_NODES, TWO_PROFILED, cost_model, two_priced

SEALED = Border(*(Traffic(0.0, 0.0),) * 4)
"""Nothing crosses."""


def test_headroom():
    """1000 bytes, 100 fixed, 200 per micro-batch: 4 in flight, so height 3.

    With 4 micro-batches in all it fits at any height; if nothing fits, at none.
    """
    base = two_priced()
    for size, expected in ((2, 3), (4, UNBOUNDED), (8, UNBOUNDED)):
        some = MicrobatchPrices(base.cost, 16, size, (1,), 1000.0)
        assert (
            some.headroom(StageFootprint(ParameterBytes(100, 0, 0, 0), 200 / size, SEALED), 1)
            == expected
        )
    assert base.headroom(StageFootprint(ParameterBytes(2e5, 0, 0, 0), 1, SEALED), 1) == -1
    assert base.headroom(StageFootprint(ParameterBytes(10, 0, 0, 0), 0, SEALED), 1) == UNBOUNDED


def test_degrees():
    """Powers of two with a sample each and a count that was profiled; more on demand."""
    cost = cost_model(TWO_PROFILED, 32)
    assert Problem(cost, 8).prices(8, 4).degrees == (1, 2, 4)
    assert Problem(cost, 2).prices(2, 4).degrees == (1, 2)
    assert Problem(cost, 16).prices(16, 32).degrees == (2, 4, 8, 16)
    assert Problem(cost, 3).prices(3, 1).degrees == (1,)
    assert Problem(cost, 8, any_degree=True).prices(8, 5).degrees == (1, 2, 3, 4, 5)


def test_microbatch_sizes():
    """Powers of two and the batch itself, or the one that was asked for."""
    cost = CostModel(TWO_PROFILED, TWO_NODES)
    assert Problem(cost, 8).sizes == (1, 2, 4, 8)
    assert Problem(cost, 6).sizes == (1, 2, 4, 6)
    assert Problem(cost, 1).sizes == (1,)
    assert Problem(cost, 8, 3).sizes == (3,)


def test_modes():
    """Fewest devices first, the plainest first."""
    some = MicrobatchPrices(CostModel(TWO_PROFILED, TWO_NODES), 16, 4, (1, 2), 1e9, recompute=True)
    assert [(mode.replicas, mode.recompute) for mode in some.modes] == [
        (1, False),
        (1, True),
        (2, False),
        (2, True),
    ]


def test_the_larger_direction_counts():
    """3 samples at half a second per byte: 30 bytes come in, 12 + 20 go out."""
    assert traffic_s(Traffic(10, 0), Traffic(4, 0), 3, 0.5) == 15
    assert traffic_s(Traffic(10, 0), Traffic(4, 20), 3, 0.5) == 16


def test_the_all_reduce_is_spread_over_the_micro_batches():
    """40 s once per step of 8, of which a backward of 6 s hides as much; of compute and transfers
    whichever is more.
    """
    assert period_s(16.0, 9.0, 46.0, 8) == 21.0
    assert period_s(16.0, 9.0, 5.0, 8) == 16.0
    assert period_s(6.0, 9.0, 5.0, 8) == 9.0


def test_periods_of_many_stages_at_once():
    """Arrays have the numbers of the stages one by one."""
    comes = Traffic(np.array([10.0, 1.0]), np.array([0.0, 0.0]))
    goes = Traffic(np.array([4.0, 4.0]), np.array([0.0, 20.0]))
    traffic = traffic_s(comes, goes, 3, 0.5)
    assert traffic.tolist() == [15.0, 16.0]
    compute = np.array([9.0, 18.0])
    assert period_s(traffic, compute, 46.0, 8).tolist() == [20.0, 22.25]


def test_compute_is_the_period_where_links_are_fast():
    """4 samples on one device: 4 * (1 + 2) s."""
    fast = Cluster("fast", "cpu", 10**5, (Level("node", 4, 1e9, 0.0),))
    assert two_priced(cluster=fast).part_period_s(Part(0b01, 1)) == 12.0


def test_replicas_share_the_card_of_their_node():
    """Micro-batches of 8. One device sends 800 bytes at 50 per s; two of one node as much together.

    With four replicas each card has two of them, with 200 bytes each: 8 s, and compute is 6 s. The
    all-reduce of 900 bytes over both nodes is 2 * 3/4 * 900 / 50 + 2 * 2 * 1 = 31 s; two thirds of
    6 s hide behind it, half of the rest is each micro-batch's. Within a node it is
    2 * 1/2 * 900 / 100 = 9 s, 8 of them hidden.
    """
    assert two_priced(8).part_period_s(Part(0b01, 1)) == 24.0  # compute; 16 s of traffic
    assert two_priced(8).part_period_s(Part(0b01, 2)) == 16.0 + (9.0 - 8.0) / 2
    assert two_priced(8).part_period_s(Part(0b01, 4)) == 8.0 + (31.0 - 4.0) / 2


def test_gradients_count_in_the_other_direction():
    """b receives 100 bytes per sample and sends as many back; each direction counts alone."""
    assert two_priced(8).part_period_s(Part(0b10, 2)) == two_priced(8).part_period_s(Part(0b01, 2))


def test_everything_in_one_stage_sends_nothing():
    """The whole model on four devices: 2 samples, 12 s; 1800 bytes summed: 58 s but 8, over 2."""
    assert two_priced(8).part_period_s(Part(0b11, 4)) == 12.0 + (58.0 - 8.0) / 2


def test_uneven_replicas_cost_what_the_fullest_does():
    """5 samples on 2 devices: 3 on the fuller."""
    assert two_priced(5).compute_s(Part(0b01, 2)) == 9.0


def test_priced_needs_both_ends():
    """Measured from 1 to 32,768 samples: 65,536 on one device are too many, on two they are not."""
    cost = cost_model(shapes.towers("small", 1, 0, layers=1, top=0), 2)
    prices = Problem(cost, 65536).prices(65536)
    assert not prices.covers_replicas(1)
    assert prices.covers_replicas(2)
