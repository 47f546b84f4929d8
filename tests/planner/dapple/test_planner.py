"""The options of DAPPLE's planner, and Table 4 of the paper."""

from collections.abc import Iterator
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.cluster import Cluster
from anabranch.cost import CostModel
from anabranch.errors import BudgetError, InfeasiblePlanError
from anabranch.files.pipedream import read_profile
from anabranch.graph.series_parallel import decompose, operators
from anabranch.planner import PLANNERS
from anabranch.planner.dapple.planner import Dapple
from anabranch.plans.check import check
from anabranch.plans.stages import Stage, StageGraph
from tests.planner import shapes
from tests.planner.dapple.latency import latency
from tests.planner.helpers import cost_model
from tests.shared_profiles import SHARED, needs_shared
from tests.strategies import planning_profiles

SMALL = shapes.towers("small", 2, 1, layers=2, top=1)


@settings(max_examples=12)
@given(
    planning_profiles(6, max_bytes=40), st.integers(1, 4), st.integers(100, 2000), st.integers(1, 8)
)
def test_finds_a_plan_wherever_sequential_does(profile, devices, memory, size):
    """Tight memory: it has more numbers of replicas to choose from, never fewer plans."""
    cost = cost_model(profile, devices, memory=memory)
    try:
        found = list(PLANNERS["sequential"]()(cost, batch_size=8, microbatch_size=size))
    except InfeasiblePlanError:
        return
    if any(stage.recompute for graph in found for stage in graph.stages):
        return
    assert list(Dapple()(cost, batch_size=8, microbatch_size=size))


def test_best_first():
    """The micro-batch size of the least L comes first, and of every size the least L does."""
    cost = cost_model(SMALL, 4, memory=2**40, bandwidth=1e9)
    proposals = list(Dapple()(cost, batch_size=64))
    values: dict[int, list[float]] = {}
    for graph in proposals:
        seconds = latency(graph, cost).total_s
        values.setdefault(graph.stages[0].microbatch_size, []).append(seconds)
    assert all(found == sorted(found) for found in values.values())
    firsts = [found[0] for found in values.values()]
    assert firsts == sorted(firsts)
    assert len(set(proposals)) == len(proposals)
    assert len(values) > 1


def test_any_number_of_replicas():
    """Two towers of unequal work on 6 devices: numbers that are no power of two occur."""
    cost = CostModel(shapes.mmt(branches=1, layers=3, parts=1), Cluster.preset("dapple-c:6"))
    proposals = list(Dapple()(cost, batch_size=512))
    replicas = {stage.replicas for graph in proposals for stage in graph.stages}
    assert replicas & {3, 5, 6}


def test_max_replicas_of_one_is_the_straight_pipeline():
    """One device per stage, as many stages as devices."""
    cost = CostModel(shapes.mmt(parts=1), Cluster.preset("summit:2x4"))
    for graph in Dapple(max_replicas=1)(cost, batch_size=256):
        assert [stage.replicas for stage in graph.stages] == [1] * 8


def test_says_when_the_budget_is_used_up():
    """Both numbers and the options, before the first proposal."""
    cost = CostModel(shapes.mmt(parts=1), Cluster.preset("summit:2x4"))
    with pytest.raises(BudgetError, match=r"budget is 50; raise its option budget"):
        Dapple(budget=50)(cost, batch_size=256)


def test_branches_are_put_in_a_row():
    """Two towers of the model one after the other: stage edges run in a row, values skip."""
    cost = CostModel(shapes.mmt(branches=2, parts=1), Cluster.preset("dapple-b:6"))
    graph = next(iter(Dapple(max_replicas=1)(cost, batch_size=64)))
    row = {(s, s + 1) for s in range(5)}
    assert row < set(graph.edges)
    assert graph.height == (5, 4, 3, 2, 1, 0)


def two_stages(
    like: StageGraph, cost: CostModel, replicas: tuple[int, ...]
) -> Iterator[StageGraph]:
    """All cuts in two with these replicas, at a few micro-batch sizes."""
    names = [cost.graph.ops[i].name for i in operators(decompose(cost.graph))]
    first, total = replicas[0], sum(replicas)
    for size, cut in product((16, 32, 64), range(1, len(names))):
        stages = (
            Stage(tuple(names[:cut]), tuple(range(first)), size),
            Stage(tuple(names[cut:]), tuple(range(first, total)), size),
        )
        graph = StageGraph(stages, ((0, 1),), like.batch_size)
        if not check(graph, cost):
            yield graph


TABLE_4 = [
    # model, batch, all-reduce overlapped: replicas of the stages on A, B and C
    ("bert-48-pbs-2", 64, False, ([8, 8], [1] * 16, [1] * 16)),
    ("vgg-19-pbs-32", 2048, True, ([16], [16], [15, 1])),
]


@needs_shared
@pytest.mark.parametrize("config", [0, 1, 2], ids="ABC")
@pytest.mark.parametrize(("model", "batch_size", "overlap", "replicas"), TABLE_4)
def test_table_4_of_the_paper(model, batch_size, overlap, replicas, config):
    """The published plan is the one with the least L.

    BERT-48 without overlap. VGG-19 with it: the paper says that data parallelism wins there because
    the all-reduce of its last layers hides behind the backward of its first (section 6.2).
    """
    cluster = Cluster.preset(("dapple-a:2x8", "dapple-b:16", "dapple-c:16")[config])
    cost = CostModel(read_profile(SHARED / "dapple" / f"{model}.txt"), cluster)
    planner = Dapple(overlap_allreduce=overlap)
    best = min(
        planner(cost, batch_size=batch_size),
        key=lambda graph: latency(graph, cost, overlap_allreduce=overlap).total_s,
    )
    assert [stage.replicas for stage in best.stages] == replicas[config]


@needs_shared
@pytest.mark.parametrize(
    ("model", "batch_size", "cluster", "published"),
    [
        ("gnmt-32-pbs-64-simplified", 1024, "dapple-a:2x8", (8, 8)),
        ("gnmt-32-pbs-64-simplified", 1024, "dapple-c:16", (1,) * 16),
        ("xlnet-24-pbs-1", 128, "dapple-b:16", (8, 8)),
        ("amoeba-18-pbs-8", 128, "dapple-c:16", (11, 5)),
    ],
)
def test_no_published_plan_is_better(model, batch_size, cluster, published):
    """Where another plan is found than the published one, its L is no more than that one's.

    The published replicas with every cut, devices in rows; the straight pipeline as the planner
    itself plans it.
    """
    cost = CostModel(read_profile(SHARED / "dapple" / f"{model}.txt"), Cluster.preset(cluster))
    proposals = list(Dapple()(cost, batch_size=batch_size))
    found = min(latency(graph, cost).total_s for graph in proposals)
    if len(published) > 2:
        others = list(Dapple(max_replicas=1)(cost, batch_size=batch_size))
    else:
        others = list(two_stages(proposals[0], cost, published))
    assert others
    assert found <= min(latency(graph, cost).total_s for graph in others) * (1 + 1e-9)
