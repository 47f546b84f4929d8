"""PipeDream's plans: what they look like, and what its options do."""

from itertools import combinations, pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.cluster import Cluster
from anabranch.cost import CostModel
from anabranch.errors import BudgetError, InfeasiblePlanError
from anabranch.graph.opgraph import Op, OpGraph, Parameter, Value
from anabranch.graph.series_parallel import decompose, operators
from anabranch.planner.pipedream.planner import PipeDream
from anabranch.planner.toolkit.assemble import fits
from anabranch.planner.toolkit.prices import MicrobatchPrices, Part
from anabranch.plans.check import check
from anabranch.profile.profile import OpCost, Profile
from tests.planner import shapes
from tests.planner.helpers import cluster
from tests.planner.pipedream.reference import nodes
from tests.strategies import planning_profiles

KINDS = [PipeDream(), PipeDream(antichains=True), PipeDream(accumulate=False)]


def chain(seconds: list[float], weights: list[int], activation: int) -> Profile:
    """Operators in a row; time is proportional to samples, a third of it forward."""
    n = len(seconds)
    graph = OpGraph(
        tuple(Op(f"layer{i}", (f"w{i}",)) for i in range(n)),
        tuple(Value(i, (i + 1,), activation) for i in range(n - 1)),
        tuple(Parameter(f"w{i}", nbytes) for i, nbytes in enumerate(weights)),
        name="chain",
    )
    costs = tuple(OpCost((s / 3,), (s * 2 / 3,), activation) for s in seconds)
    return Profile(graph, (1,), costs, device="cpu", source="imported", proportional=True)


@settings(max_examples=15, deadline=None)
@given(
    planner=st.sampled_from(KINDS[:2]),
    profile=planning_profiles(6, series_parallel=False),
    shape=st.sampled_from([(1,), (3,), (8,), (2, 2), (3, 2), (1, 4), (2, 2, 2)]),
    batch_size=st.integers(1, 12),
    memory=st.sampled_from([60, 200, 10**9]),
)
def test_any_levels_get_valid_plans(planner, profile, shape, batch_size, memory):
    """Any graph, levels, batch and memory: valid proposals, each once, or why not."""
    cost = CostModel(profile, nodes(*shape, memory=memory), optimizer_factor=1.0)
    try:
        proposals = list(planner(cost, batch_size=batch_size))
    except InfeasiblePlanError:
        return
    assert [check(graph, cost) for graph in proposals] == [[] for _ in proposals]
    assert len(set(proposals)) == len(proposals)


@given(
    planning_profiles(5, series_parallel=False),
    st.sampled_from([(2,), (5,), (2, 2), (4, 2), (3, 2)]),
    st.sampled_from([1, 2, 3, 6]),
    st.integers(1, 3),
    st.integers(15, 90),
)
def test_finds_a_plan_whenever_a_row_of_stages_fits(profile, shape, size, count, memory):
    """Every cut of the row with any replicas that use all devices: it fails only if all do."""
    cost = CostModel(profile, nodes(*shape, memory=memory), optimizer_factor=1.0)
    try:
        planned = bool(list(PipeDream()(cost, batch_size=size * count, microbatch_size=size)))
    except InfeasiblePlanError:
        planned = False
    assert planned == any_row_fits(cost, size * count, size)


def any_row_fits(cost: CostModel, batch_size: int, size: int) -> bool:
    """Whether stages that are runs of the operators, branch after branch, can use all devices."""
    order = tuple(operators(decompose(cost.graph)))
    total = cost.cluster.num_devices
    prices = MicrobatchPrices(cost, batch_size, size, (), cost.cluster.memory_bytes)
    most = [d for d in range(1, min(size, total) + 1) if cost.covers(-(-size // d))]
    for k in range(1, len(order) + 1):
        for cuts in combinations(range(1, len(order)), k - 1):
            ends = [0, *cuts, len(order)]
            masks = [sum(1 << op for op in order[i:j]) for i, j in pairwise(ends)]
            for replicas in product(most, repeat=k):
                if sum(replicas) == total:
                    parts = [Part(mask, d) for mask, d in zip(masks, replicas, strict=True)]
                    if fits(prices, parts, {(s, s + 1) for s in range(k - 1)}):
                        return True
    return False


def test_many_devices_for_a_small_head():
    """The paper's 15-1 for VGG: the layers with the work on 15 devices, those with the weights on
    one. Anything else computes or reduces for longer.
    """
    vgg = chain([1.0] * 15 + [1.0], [1] * 15 + [10_000], activation=1)
    cost = CostModel(vgg, nodes(1, 16, bandwidths=(1e3, 1e3)), optimizer_factor=1.0)
    first, *_ = PipeDream(accumulate=False)(cost, batch_size=60, microbatch_size=15)
    assert [stage.devices for stage in first.stages] == [tuple(range(15)), (15,)]
    assert [len(stage.operators) for stage in first.stages] == [15, 1]


def test_the_same_on_nodes():
    """Four nodes of four: 15 devices are no whole number of nodes, so twelve layers are on three
    nodes, and in the fourth three layers on three devices and the head on the last.
    """
    vgg = chain([1.0] * 15 + [1.0], [1] * 15 + [10_000], activation=1)
    cost = CostModel(vgg, nodes(4, 4, bandwidths=(1e3, 1e3)), optimizer_factor=1.0)
    first, *_ = PipeDream(accumulate=False)(cost, batch_size=12 * 4, microbatch_size=12)
    assert first.stages[-1].devices == (15,)
    assert [stage.replicas for stage in first.stages] == [12, 3, 1]
    assert [len(stage.operators) for stage in first.stages] == [12, 3, 1]


def test_a_pipeline_inside_every_node():
    """Fast links inside the nodes, slow ones between, large activations and few weights: the whole
    pipeline is in every node, and its stages are replicated across the nodes.
    """
    profile = chain([3.0, 3.0, 3.0], [1000, 1000, 10], activation=100)
    cost = CostModel(profile, nodes(3, 2, bandwidths=(1e3, 300.0)), optimizer_factor=1.0)
    first, *_ = PipeDream(max_replicas=2)(cost, batch_size=16, microbatch_size=2)
    assert [stage.devices for stage in first.stages] == [(0, 3), (1, 4), (2, 5)]


def test_levels_give_way():
    """Two nodes of four, three operators, micro-batches of 3: nodes would have to be cut into two
    stages each, or hold copies of one pipeline of four stages. Side by side the devices do.
    """
    profile = chain([1.0] * 3, [1] * 3, activation=1)
    cost = CostModel(profile, nodes(4, 2), optimizer_factor=1.0)
    for graph in PipeDream()(cost, batch_size=6, microbatch_size=3):
        assert check(graph, cost) == []
        assert sorted(stage.replicas for stage in graph.stages) == [2, 3, 3]


def test_data_parallelism_is_a_special_case():
    """No weights to speak of, large activations: one stage on all devices, over both levels."""
    profile = chain([1.0] * 4, [1] * 4, activation=10_000)
    cost = CostModel(profile, nodes(2, 3, bandwidths=(1e3, 1e3)), optimizer_factor=1.0)
    for planner in KINDS:
        for graph in planner(cost, batch_size=24, microbatch_size=6):
            assert [stage.devices for stage in graph.stages] == [tuple(range(6))]


def test_a_straight_pipeline_is_a_special_case():
    """Weights everywhere, small activations: a device per stage. So too if replicas are ruled out,
    whatever the weights.
    """
    heavy = chain([1.0] * 6, [10_000] * 6, activation=1)
    cost = CostModel(heavy, nodes(3, 2, bandwidths=(1e3, 1e3)), optimizer_factor=1.0)
    for planner in KINDS:
        for graph in planner(cost, batch_size=24, microbatch_size=6):
            assert [stage.devices for stage in graph.stages] == [(d,) for d in range(6)]
    light = CostModel(shapes.mmt(parts=1), Cluster.preset("summit:2x4"))
    for graph in PipeDream(max_replicas=1)(light, batch_size=128):
        assert [stage.replicas for stage in graph.stages] == [1] * 8


def test_one_reduction_per_step_costs_less():
    """The paper reduces after every round of its replicas and finds weights too dear to replicate;
    with 1000 micro-batches to a step they are not.
    """
    profile = chain([1.0, 1.0], [300, 300], activation=90)
    cost = CostModel(profile, nodes(2, bandwidths=(100.0,)), optimizer_factor=1.0)
    paper, step = PipeDream()(cost, batch_size=2000, microbatch_size=2)
    assert [stage.replicas for stage in paper.stages] == [1, 1]
    assert [stage.replicas for stage in step.stages] == [2]
    assert list(PipeDream(accumulate=False)(cost, batch_size=2000, microbatch_size=2)) == [paper]


def test_stages_follow_one_another():
    """In a row an edge from each stage to the next; as antichains only edges along values."""
    cost = CostModel(shapes.mmt(layers=2, parts=1), Cluster.preset("summit:2x4"))
    for graph in PipeDream()(cost, batch_size=128):
        assert {(s, s + 1) for s in range(len(graph) - 1)} <= set(graph.edges)
        assert graph.depth == len(graph)
    for graph in PipeDream(antichains=True)(cost, batch_size=128):
        stage_of = {name: s for s, stage in enumerate(graph.stages) for name in stage.operators}
        names = [op.name for op in cost.graph.ops]
        pairs = {(stage_of[names[a]], stage_of[names[b]]) for a, b in cost.graph.edges}
        assert set(graph.edges) == {(x, y) for x, y in pairs if x != y}


def test_antichains_know_their_budget():
    """7 branches of 4 layers have 5 ** 7 downsets and more."""
    cost = CostModel(shapes.candle_uno(), Cluster.preset("summit:2x4"))
    with pytest.raises(BudgetError, match="budget of 2,000"):
        list(PipeDream(antichains=True)(cost, batch_size=4096))


def test_a_search_that_ends_early_keeps_what_it_has():
    """Fewer steps than all sizes take: the proposals of the first sizes; far fewer: an error."""
    cost = CostModel(shapes.candle_uno(), Cluster.preset("summit:2x4"))
    every = list(PipeDream()(cost, batch_size=256))
    some = list(PipeDream(steps=300_000)(cost, batch_size=256))
    assert 0 < len(some) < len(every)
    assert some == every[: len(some)]
    with pytest.raises(BudgetError, match="option steps"):
        list(PipeDream(steps=1000)(cost, batch_size=256))


def test_memory_decides():
    """Too large for a device: stages; the first holds the most micro-batches and gets the least."""
    profile = chain([1.0] * 8, [10] * 8, activation=10)
    ample = CostModel(profile, cluster(4, memory=10**6), optimizer_factor=1.0)
    tight = CostModel(profile, cluster(4, memory=190), optimizer_factor=1.0)
    assert [s.replicas for s in next(iter(PipeDream()(ample, batch_size=64))).stages] == [4]
    for graph in PipeDream()(tight, batch_size=64):
        assert check(graph, tight) == []
        assert len(graph.stages) > 1
