"""One stage on all devices."""

import pytest

from anabranch.cluster import Cluster
from anabranch.cost import CostModel
from anabranch.errors import InfeasiblePlanError
from anabranch.planner.data_parallel import DataParallel
from tests.planner import shapes
from tests.planner.helpers import cost_model

SMALL = shapes.towers("small", 2, 1, layers=2, top=1)


def test_one_stage_for_every_microbatch_size():
    """Four devices, a batch of 16: micro-batches of 4, 8 and 16, gradients accumulated."""
    proposals = DataParallel()(cost_model(SMALL, 4, memory=2**40), batch_size=16)
    assert sorted(graph.stages[0].microbatch_size for graph in proposals) == [4, 8, 16]
    assert {graph.stages[0].devices for graph in proposals} == {(0, 1, 2, 3)}
    assert {len(graph) for graph in proposals} == {1}


def test_devices_need_not_divide_the_batch():
    """Three devices: micro-batches of 4, of which one gets two samples."""
    proposals = DataParallel()(cost_model(SMALL, 3, memory=2**40), batch_size=4)
    assert [graph.stages[0].microbatch_size for graph in proposals] == [4]


def test_large_microbatches_first_where_launches_cost():
    """Launches make small ones slow; memory rules out the largest."""
    cost = CostModel(shapes.mmt(parts=1), Cluster.preset("summit:1x4"))
    sizes = [g.stages[0].microbatch_size for g in DataParallel()(cost, batch_size=256)]
    assert sizes[0] == max(sizes)


def test_says_when_the_batch_is_too_small():
    """Eight devices, a batch of 4."""
    with pytest.raises(InfeasiblePlanError, match="micro-batches of at least 8 samples"):
        DataParallel()(cost_model(SMALL, 8, memory=2**40), batch_size=4)


def test_says_what_a_device_would_need():
    """The whole model on each: about 350 million weights, 16 bytes each with Adam's state."""
    with pytest.raises(
        InfeasiblePlanError, match=r"needs \d+\.\d\d GiB on each device at 1 samples"
    ):
        DataParallel()(cost_model(SMALL, 2, memory=2**30), batch_size=4)


def test_recomputation_would_save_nothing():
    """One micro-batch is in flight: its insides are kept at once, whenever that is."""
    cost = cost_model(SMALL, 2, memory=2**40)
    keep, again = (
        cost.device_bytes(
            range(len(cost.graph)), microbatch_size=8, replicas=2, in_flight=1, recompute=recompute
        )
        for recompute in (False, True)
    )
    assert again == keep
