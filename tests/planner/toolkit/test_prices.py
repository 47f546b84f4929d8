"""Modes, numbers of replicas, micro-batch sizes and heights that fit memory."""

from __future__ import annotations

from anabranch.cost import CostModel
from anabranch.cost.stage_weights import Border, StageWeights, Traffic
from anabranch.planner.toolkit.prices import UNBOUNDED, MicrobatchPrices
from anabranch.planner.toolkit.problem import Problem
from tests.planner.helpers import TWO_NODES, TWO_PROFILED, cost_model, two_priced

SEALED = Border(*(Traffic(0.0, 0.0),) * 4)
"""Nothing crosses."""


def test_headroom():
    """1000 bytes, 100 fixed, 200 per micro-batch: 4 in flight, so height 3.

    With 4 micro-batches in all it fits at any height; if nothing fits, at none.
    """
    base = two_priced().microbatch
    for size, expected in ((2, 3), (4, UNBOUNDED), (8, UNBOUNDED)):
        some = MicrobatchPrices(base.cost, 16, size, (1,), 1000.0)
        assert some.headroom(StageWeights(100, 0, 200 / size, SEALED), 1) == expected
    assert base.headroom(StageWeights(2e5, 0, 1, SEALED), 1) == -1
    assert base.headroom(StageWeights(10, 0, 0, SEALED), 1) == UNBOUNDED


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
