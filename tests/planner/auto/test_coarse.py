"""Coarse problems and the plans of the whole that theirs become."""

import pytest

from anabranch.cluster import Cluster, Level
from anabranch.cost import CostModel
from anabranch.planner.auto import coarse as module
from anabranch.planner.auto.coarse import coarsen
from anabranch.planner.auto.planner import Auto
from anabranch.planner.auto.settings import Settings
from anabranch.plans.check import check
from anabranch.plans.stages import Stage, StageGraph
from tests.planner.helpers import linked_model

#  0 -> 1 -> .. -> 5 -> 6 -> 7      and from 2 to 6 past the others
LINKS = [*((i, i + 1) for i in range(7)), (2, 6)]


@pytest.fixture
def few(monkeypatch):
    """Four operators and four devices are the most that is searched one by one."""
    monkeypatch.setattr(module, "SETTINGS", Settings(most=4))


def model(nodes: int, devices: int = 2) -> CostModel:
    """Eight operators of one second, on nodes of some devices."""
    levels = (Level("node", devices, 1e9, 0.0), Level("network", nodes, 1e9, 0.0))
    return CostModel(linked_model(8, LINKS).profile, Cluster("test", "cpu", 2**30, levels))


def test_what_is_small_stays_as_it_is():
    """There is no coarser problem."""
    assert coarsen(model(8), 64, None) is None


def test_operators_in_a_row_are_joined(few):
    """Two at a time, a fourth of the work each; not where a branch begins or ends."""
    found = coarsen(model(2), 64, None)
    assert found is not None
    masks = found.contracted.masks
    assert masks == (0b00000011, 0b00000100, 0b00011000, 0b00100000, 0b11000000)
    assert found.factor == 1


@pytest.mark.parametrize(
    ("nodes", "batch", "size", "factor"),
    [(8, 64, None, 4), (8, 6, None, 2), (8, 64, 2, 2), (3, 64, None, 1), (7, 63, None, 1)],
)
def test_a_part_of_the_cluster_trains_a_part_of_the_batch(few, nodes, batch, size, factor):
    """As small as whole nodes, whole samples and the micro-batch size allow."""
    found = coarsen(model(nodes), batch, size)
    assert found is not None
    assert found.factor == factor
    assert found.cost.cluster.num_devices == 2 * nodes // factor


def test_stages_of_the_whole_have_more_replicas(few):
    """Two nodes become eight: the stage on the first has the first four of them."""
    cost = model(8)
    found = coarsen(cost, 64, None)
    assert found is not None
    names = [op.name for op in found.cost.graph.ops]
    stages = (Stage(tuple(names[:2]), (0, 1), 4), Stage(tuple(names[2:]), (2, 3), 4))
    whole = found.expand(StageGraph(stages, ((0, 1),), 16))
    assert check(whole, cost) == []
    assert [stage.devices for stage in whole.stages] == [tuple(range(8)), tuple(range(8, 16))]
    assert [stage.microbatch_size for stage in whole.stages] == [16, 16]
    assert [len(stage.operators) for stage in whole.stages] == [3, 5]
    assert whole.batch_size == 64


@pytest.mark.parametrize("most", [2, 4, 8])
def test_a_limit_on_replicas_is_that_of_the_whole(few, most):
    """Four times the devices: a stage of the coarser model may have a fourth of the replicas."""
    cost = model(8)
    search = Auto(max_replicas=most, evaluations=200)(cost, batch_size=64)
    proposals = list(search)
    assert all(stage.replicas <= most for graph in proposals for stage in graph.stages)
    coarser = [graph for graph in proposals if "a coarser model" in search.origin(graph)]
    assert bool(coarser) == (most >= 4)
