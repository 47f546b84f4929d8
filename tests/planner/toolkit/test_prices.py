"""Modes, numbers of replicas, micro-batch sizes and heights that fit memory."""

from __future__ import annotations

from anabranch.cost import CostModel
from anabranch.cost.stage_weights import Border, StageWeights, Traffic
from anabranch.planner.toolkit.prices import (
    UNBOUNDED,
    MicrobatchPrices,
    degrees,
    microbatch_sizes,
)
from tests.planner.helpers import TWO_NODES, TWO_PROFILED, sharded, two_priced

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
    cost = CostModel(TWO_PROFILED, TWO_NODES)
    assert degrees(cost, 8, 4) == (1, 2, 4)
    assert degrees(cost, 2, 4) == (1, 2)
    assert degrees(cost, 16, 32) == (2, 4, 8, 16)
    assert degrees(cost, 3, 1) == (1,)
    assert degrees(cost, 8, 5, every=True) == (1, 2, 3, 4, 5)


def test_microbatch_sizes():
    """Powers of two and the batch itself, or the one that was asked for."""
    assert microbatch_sizes(8) == (1, 2, 4, 8)
    assert microbatch_sizes(6) == (1, 2, 4, 6)
    assert microbatch_sizes(1) == (1,)
    assert microbatch_sizes(8, 3) == (3,)


def test_modes():
    """Fewest devices first, the plainest first; groups of two on at most four devices."""
    cost = CostModel(sharded(TWO_PROFILED), TWO_NODES)
    some = MicrobatchPrices(cost, 16, 4, (1, 2, 4), 1e9, (1, 2), recompute=True, max_devices=4)
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
