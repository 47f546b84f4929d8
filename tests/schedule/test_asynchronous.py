"""Stages where no batch ends: what they hold, and which cannot do without a flush."""

from dataclasses import replace

import pytest

from anabranch.errors import InvalidPlanError
from anabranch.schedule import asynchronous
from tests.simulator.helpers import chain, stage_graph


def one_by_one(count: int, batch_size: int, size: int):
    """A chain with a device per stage."""
    return stage_graph(chain(count), [(i,) for i in range(count)], batch_size, [size] * count)


@pytest.mark.parametrize(("batch_size", "size"), [(1, 1), (8, 8), (8, 1)])
def test_the_full_pipeline(batch_size, size):
    """The longest distance to the sink plus 1, also where that is more than a mini-batch has."""
    graph = asynchronous.warm_up(one_by_one(4, batch_size, size))
    assert [stage.in_flight for stage in graph.stages] == [4, 3, 2, 1]
    assert graph.batch_size == batch_size


def test_a_deep_warm_up_is_not_cut_either():
    """Two more per stage edge."""
    graph = asynchronous.full_pipeline(one_by_one(3, 2, 2), per_hop=2)
    assert [stage.in_flight for stage in graph.stages] == [5, 3, 1]


@pytest.mark.parametrize(
    ("batch_size", "sizes", "k", "message"),
    [
        (10, [4, 4], 1, r"micro-batches of 4 samples, which do not divide a mini-batch of 10"),
        (8, [4, 2], 1, r"stage 0 has micro-batches of 4 samples, stage 1 of 2"),
        (8, [2, 2], 2, r"alternates groups of 2"),
    ],
)
def test_what_cannot_run_without_a_flush(batch_size, sizes, k, message):
    """Each with its reason."""
    graph = stage_graph(chain(2), [(0,), (1,)], batch_size, sizes)
    graph = replace(graph, stages=tuple(replace(stage, k=k) for stage in graph.stages))
    with pytest.raises(InvalidPlanError, match=message):
        asynchronous.warm_up(graph)
