"""Slices of micro-batches, against every slice that a stage graph has."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from anabranch.plans.slices import profile_covers, slice_sizes
from anabranch.plans.stages import Stage, StageGraph
from tests.planner import shapes
from tests.planner.helpers import cost_model


@given(st.integers(1, 24), st.integers(1, 24), st.integers(1, 6))
def test_the_ends_of_all_slices(batch_size, microbatch_size, replicas):
    """The fewest and most samples of any slice, the short last micro-batch included."""
    size = min(microbatch_size, batch_size)
    graph = StageGraph((Stage(("op",), tuple(range(replicas)), size),), (), batch_size)
    slices = {
        stop - start
        for i in range(graph.num_microbatches(0))
        for start, stop in (graph.slice(0, i, r) for r in range(replicas))
    } - {0}
    found = {*slice_sizes(size, replicas)}
    if batch_size % size:
        found |= {*slice_sizes(batch_size % size, replicas)}
    assert found == slices


def test_priced_needs_both_ends():
    """Measured from 1 to 32,768 samples: 65,536 on one device are too many, on two they are not."""
    cost = cost_model(shapes.towers("small", 1, 0, layers=1, top=0), 2)
    assert not profile_covers(cost, 65536, 65536, 1)
    assert profile_covers(cost, 65536, 65536, 2)
