"""The sweep over micro-batch sizes, what is proposed, and what is refused."""

from dataclasses import replace

import pytest

from anabranch.cluster import Cluster
from anabranch.cost import CostModel
from anabranch.errors import BudgetError, InfeasiblePlanError
from anabranch.planner.graphpipe import planner
from anabranch.planner.graphpipe.planner import GraphPipe
from anabranch.plans.check import check
from tests.planner import shapes
from tests.planner.graphpipe.test_partitioner import Y_SHAPE, drawn
from tests.planner.helpers import cost_model


def test_one_microbatch_size_and_powers_of_two():
    """As published: 1F1B, one size in all stages of a plan, and every size has one."""
    cost = CostModel(shapes.mmt(parts=1), Cluster.preset("summit:2x4"))
    sizes = set[int]()
    for graph in GraphPipe()(cost, batch_size=16):
        assert check(graph, cost) == []
        (size,) = {stage.microbatch_size for stage in graph.stages}
        sizes.add(size)
        assert all(stage.replicas.bit_count() == 1 for stage in graph.stages)
        assert all(stage.k == 1 for stage in graph.stages)
        assert not any(stage.recompute for stage in graph.stages)
    assert sizes == {1, 2, 4, 8, 16}


def test_branches_have_edges_to_the_join_only():
    """Two branches of two equal operators: two paths that meet."""
    cost = cost_model(drawn({"a1": 1, "a2": 1, "b1": 1, "b2": 1, "join": 1}, Y_SHAPE), 5)
    first = next(iter(GraphPipe()(cost, batch_size=4, microbatch_size=1)))
    assert [stage.operators for stage in first.stages] == [
        ("a1",),
        ("a2",),
        ("b1",),
        ("b2",),
        ("join",),
    ]
    assert first.edges == ((0, 1), (1, 4), (2, 3), (3, 4))


def test_branches_are_placed_in_both_orders():
    """Nodes of two: branch after branch keeps a branch together, from the sink its last stages."""
    times = {"a1": 1, "a2": 1, "b1": 1, "b2": 1, "join": 1}
    cost = cost_model(drawn(times, Y_SHAPE), 6, node=2)
    proposals = list(GraphPipe()(cost, batch_size=8, microbatch_size=2))
    assert [check(graph, cost) for graph in proposals] == [[] for _ in proposals]
    assert proposals[0].stages[0].operators == proposals[1].stages[0].operators
    assert proposals[0] != proposals[1]


def test_a_size_and_groups_for_every_stage():
    """As an option: valid plans, whose stages may differ."""
    cost = cost_model(drawn({"a1": 1, "a2": 2, "b1": 1, "b2": 1, "join": 1}, Y_SHAPE), 4)
    proposals = list(GraphPipe(per_stage=True)(cost, batch_size=8))
    assert proposals
    assert [check(graph, cost) for graph in proposals] == [[] for _ in proposals]


def test_too_many_configurations_are_refused(monkeypatch):
    """All sizes and groups for every stage of mmt on 32 devices: a paragraph, not an hour."""
    monkeypatch.setattr(planner, "STEPS", 1e8)
    cost = CostModel(shapes.mmt(), Cluster.preset("summit:8x4"))
    with pytest.raises(BudgetError, match="leave out the option per_stage"):
        list(GraphPipe(per_stage=True)(cost, batch_size=512))


def test_recomputes_only_where_nothing_fits():
    """Layers that keep more than a device holds: the paper has no plan."""
    profile = shapes.mmt(branches=2, layers=4, parts=1)
    kept = tuple(replace(cost, kept_bytes=40 * cost.kept_bytes) for cost in profile.costs)
    cost = cost_model(replace(profile, costs=kept), 4, memory=26 * 10**8)
    found = list(GraphPipe()(cost, batch_size=64, microbatch_size=16))
    assert any(stage.recompute for graph in found for stage in graph.stages)
    assert [check(graph, cost) for graph in found] == [[] for _ in found]


@pytest.mark.parametrize("branches", [0, 8], ids=["row", "branches"])
def test_large_models(branches):
    """600 operators on 256 devices, which are given out in groups: valid plans."""
    layers = 600 // max(1, branches)
    profile = shapes.towers("large", max(1, branches), 0, layers=layers, width=2048, top=1)
    cost = CostModel(profile, Cluster.preset("summit:64x4"))
    proposals = list(GraphPipe()(cost, batch_size=4096, microbatch_size=256))
    assert [check(graph, cost) for graph in proposals] == [[] for _ in proposals]
    assert max(len(graph) for graph in proposals) > 8


@pytest.mark.parametrize(
    ("profile", "batch_size"),
    [(shapes.mmt(parts=1), 64), (shapes.dlrm(), 2048), (shapes.candle_uno(), 32768)],
    ids=["mmt", "dlrm", "candle-uno"],
)
def test_published_models(profile, batch_size):
    """The models of the paper at 32 devices: valid plans, wider and shallower than a chain."""
    cost = CostModel(profile, Cluster.preset("summit:8x4"))
    proposals = list(GraphPipe()(cost, batch_size=batch_size))
    assert [check(graph, cost) for graph in proposals] == [[] for _ in proposals]
    assert any(graph.depth < len(graph) for graph in proposals)


def test_memory_that_nothing_fits():
    """The paragraph names what would do."""
    cost = cost_model(shapes.towers("small", 2, 0, layers=2, top=1), 2, memory=10**6)
    with pytest.raises(InfeasiblePlanError, match=r"needs at least .* GiB"):
        list(GraphPipe()(cost, batch_size=8))
