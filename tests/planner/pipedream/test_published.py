"""Plans for the profiles that the paper's authors published."""

import pytest

from anabranch.cluster import Cluster
from anabranch.cost import CostModel
from anabranch.errors import BudgetError
from anabranch.files.pipedream import read_profile
from anabranch.planner.pipedream.planner import PipeDream
from anabranch.plans.check import check
from tests.shared_profiles import SHARED, needs_shared

FILES = sorted((SHARED / "pipedream").glob("*/graph.txt"))


@needs_shared
@pytest.mark.parametrize("file", FILES, ids=[file.parent.name for file in FILES])
def test_plans_every_published_profile(file):
    """On two nodes of two, at the mini-batch of the profile; NASNet has 1,250 operators."""
    profile = read_profile(file)
    cost = CostModel(profile, Cluster.preset("summit:2x2"), optimizer_factor=1.0)
    (size,) = profile.samples
    proposals = list(PipeDream()(cost, batch_size=4 * size, microbatch_size=size))
    assert proposals
    assert [check(graph, cost) for graph in proposals] == [[] for _ in proposals]


@needs_shared
def test_vgg_16_is_15_to_1():
    """The paper's configuration for 16 devices: classifier layers on one, the rest on 15."""
    profile = read_profile(SHARED / "pipedream" / "vgg16" / "graph.txt")
    cost = CostModel(profile, Cluster.preset("dapple-b:16"), optimizer_factor=1.0)
    for planner in (PipeDream(), PipeDream(antichains=True)):
        for graph in planner(cost, batch_size=2048, microbatch_size=128):
            assert [stage.replicas for stage in graph.stages] == [15, 1]
            assert sum("Linear" in name for name in graph.stages[1].operators) == 3


@needs_shared
def test_branches_have_too_many_antichains():
    """GNMT: 44 operators, 6,720 downsets."""
    profile = read_profile(SHARED / "pipedream" / "gnmt" / "graph.txt")
    cost = CostModel(profile, Cluster.preset("dapple-b:16"), optimizer_factor=1.0)
    with pytest.raises(BudgetError, match="2,001 downsets of its 44 operators"):
        list(PipeDream(antichains=True)(cost, batch_size=1536))
