"""Planner piper: proposals that hold, what its options do, and when it gives up."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.cluster import Cluster
from anabranch.cost import CostModel
from anabranch.errors import BudgetError, InfeasiblePlanError
from anabranch.graph.opgraph import Op, OpGraph, Value
from anabranch.planner.piper.planner import Piper
from anabranch.planner.toolkit.prices import Mode
from anabranch.plans.check import check
from anabranch.plans.stages import StageGraph
from anabranch.profile.profile import OpCost, Profile
from benchmarks.planners.published import read_profile
from tests.planner import shapes
from tests.planner.helpers import cluster, cost_model
from tests.planner.piper.reference import Reference, rich_profiles, row
from tests.shared_profiles import SHARED, needs_shared


def loads(graph: StageGraph, cost: CostModel) -> list[float]:
    """The load of every stage."""
    size = graph.stages[0].microbatch_size
    reference = Reference(cost, graph.batch_size, size)
    return [
        reference.load_s(cost.graph.mask(stage.operators), Mode(stage.replicas, stage.recompute))
        for stage in graph.stages
    ]


@given(
    profile=rich_profiles(6),
    devices=st.integers(1, 8),
    batch_size=st.integers(1, 12),
    memory=st.sampled_from([30, 60, 200, 10**9]),
    options=st.sampled_from(
        [{"linear": True}, {"any_degree": True}, {"recompute": False}, {"max_replicas": 2}]
    ),
)
def test_plans_keep_to_the_options(profile, devices, batch_size, memory, options):
    """Valid lines of stages, each once, with few enough replicas."""
    node = devices // 2 if devices % 2 == 0 else None
    machines = cluster(devices, node=node, memory=memory, bandwidth=8.0)
    piper = Piper(**options)
    try:
        proposals = list(piper(CostModel(profile, machines, 1.0), batch_size=batch_size))
    except InfeasiblePlanError:
        return
    cost = CostModel(profile, machines, 1.0)
    assert [check(graph, cost) for graph in proposals] == [[] for _ in proposals]
    assert len(set(proposals)) == len(proposals)
    for graph in proposals:
        assert set(pairwise(range(len(graph)))) <= set(graph.edges)
        for stage in graph.stages:
            assert stage.in_flight == 0
            assert stage.replicas <= options.get("max_replicas", 8)


@given(profile=rich_profiles(), devices=st.sampled_from([1, 2, 4]))
def test_proposes_the_least_load_on_all_devices(profile, devices):
    """Nothing on exactly all devices has a smaller load than the best proposal."""
    cost = cost_model(profile, devices, memory=10**9, bandwidth=8.0)
    proposals = list(Piper(tolerance=0.0)(cost, batch_size=16, microbatch_size=4))
    best = Reference(cost, 16, 4, (1, 2, 4)).best()
    least = min(load for (used, _), load in best.items() if used == devices)
    assert min(max(loads(graph, cost)) for graph in proposals) <= least * (1 + 2e-9) + 1e-12


def test_cuts_across_branches():
    """Two branches on two devices. On the left the branches are as long as each other. On the right
    a row can be cut after 5, 8 or 10 s of 14, and only the first operators of both have 7.

    ::

        a1 (5) a2 (2)        a1 (5) a2 (3)
        b1 (4) b2 (3)        b1 (2) b2 (4)
    """
    assert split((5.0, 2.0, 4.0, 3.0)) == [7.0, 7.0]
    assert split((5.0, 2.0, 4.0, 3.0), linear=True) == [7.0, 7.0]
    assert split((5.0, 3.0, 2.0, 4.0)) == [7.0, 7.0]
    assert split((5.0, 3.0, 2.0, 4.0), linear=True) == [6.0, 8.0]


def split(seconds: tuple[float, ...], **options: bool) -> list[float]:
    """Loads of two stages of a1 -> a2 and b1 -> b2, ascending."""
    graph = OpGraph(
        tuple(Op(name) for name in ("a1", "a2", "b1", "b2")), (Value(0, (1,), 0), Value(2, (3,), 0))
    )
    costs = tuple(OpCost((s,), (0.0,), 0) for s in seconds)
    profile = Profile(graph, (1,), costs, "cpu", "measured", proportional=True)
    cost = cost_model(profile, 2)
    (planned,) = Piper(**options)(cost, batch_size=64, microbatch_size=1)
    return sorted(loads(planned, cost))


def test_recomputes_only_where_memory_asks_for_it():
    """A chain on two devices: with room none, with less the first stage, which holds two, then
    both; without the option then nothing fits.
    """
    profile = shapes.towers("small", 1, 0, layers=8, width=64, top=0)
    # 128 samples of 64 numbers kept by each of 4 or 5 operators, against small weights.
    wide = tuple(replace(cost, kept_bytes=1 << 20) for cost in profile.costs)
    profile = replace(profile, costs=wide)

    def recomputing(memory: int, **options: bool) -> list[bool]:
        cost = cost_model(profile, 2, memory=memory)
        (graph,) = Piper(**options)(cost, batch_size=64, microbatch_size=1)
        return [stage.recompute for stage in graph.stages]

    mib = 1 << 20
    assert recomputing(12 * mib) == [False, False]
    assert recomputing(7 * mib) == [True, False]
    with pytest.raises(
        InfeasiblePlanError, match=r"small needs at least 7\.3 MiB per device .* has 5\.0 MiB"
    ):
        recomputing(5 * mib, recompute=False)
    assert True in recomputing(int(5.5 * mib))


def test_idle_devices_go_to_work():
    """Three devices and one operator: 2 replicas and 1 device left, so 3 replicas."""
    one = shapes.towers("small", 1, 0, layers=1, top=0)
    cost = cost_model(one, 7, memory=2**40)
    for graph in Piper()(cost, batch_size=64):
        assert graph.devices == tuple(range(7))


def test_any_degree():
    """6 devices, 2 operators of 3 s per sample: 6 replicas of both is the least load. In powers of
    two, 4 replicas of both are as good as 4 of one and 2 of the other; and idle devices go to work.
    """
    cost = cost_model(row(2, 0), 6)

    def replicas(**options: bool) -> list[list[int]]:
        graphs = Piper(**options)(cost, batch_size=768, microbatch_size=768)
        return [sorted(stage.replicas for stage in graph.stages) for graph in graphs]

    assert replicas() == [[6], [2, 4]]
    assert replicas(any_degree=True) == [[6]]


def test_gives_up_on_many_branches():
    """7 branches of 8 operators: 9 ** 7 downsets. In a row they are planned."""
    cost = cost_model(shapes.towers("wide", 7, 0, layers=8, top=1), 8, memory=2**40)
    with pytest.raises(BudgetError, match=r"20,001 downsets .* budget of 20,000"):
        Piper()(cost, batch_size=64)
    graphs = list(Piper(linear=True)(cost, batch_size=64))
    assert graphs
    assert all(not check(graph, cost) for graph in graphs)


def test_gives_up_on_too_many_pairs():
    """3 branches of 4: 126 downsets, 3,375 pairs of which one holds the other and one more to all
    from each of the 125.
    """
    cost = cost_model(shapes.towers("wide", 3, 0, layers=4, top=0), 2, memory=2**40)
    with pytest.raises(BudgetError, match=r"pairs of them, more than the budget of 100 pairs"):
        Piper(pairs=100)(cost, batch_size=8)
    assert list(Piper(budget=200, pairs=4_000)(cost, batch_size=8))


def test_says_what_memory_would_do():
    """A model that fits nowhere: 384 MiB of weights with gradients and as much of an optimizer, in
    two halves, and a layer's gradients before they are added. With that it fits.
    """
    profile = shapes.towers("small", 2, 0, layers=2, top=1)
    with pytest.raises(InfeasiblePlanError, match=r"small needs at least 0\.69 GiB"):
        Piper()(cost_model(profile, 2, memory=10**6), batch_size=8)
    assert list(Piper()(cost_model(profile, 2, memory=740 * 2**20), batch_size=8))


def test_a_row_never_has_a_smaller_load():
    """Two branches of MMT: the best chain of downsets is at least as good as the best in a row."""
    cost = CostModel(shapes.mmt(2, 6, parts=1), Cluster.preset("summit:2x4"))
    for size in (2, 8, 32):
        nested = Piper()(cost, batch_size=128, microbatch_size=size)
        row = Piper(linear=True)(cost, batch_size=128, microbatch_size=size)
        least = min(max(loads(graph, cost)) for graph in nested)
        assert least <= min(max(loads(graph, cost)) for graph in row) * 1.001


@needs_shared
@pytest.mark.parametrize(
    ("name", "machines", "options"),
    [
        ("bert32a100", "dgx-h100:1x8", {}),
        ("resnet", "summit:2x4", {}),
        ("gnmt", "summit:2x4", {"linear": True}),
    ],
)
def test_plans_its_own_profiles(name, machines, options):
    """The files that its authors published: valid plans."""
    cost = CostModel(read_profile(SHARED / "piper" / f"{name}.json"), Cluster.preset(machines))
    graphs = list(Piper(**options)(cost, batch_size=64, microbatch_size=1))
    assert graphs
    assert all(not check(graph, cost) for graph in graphs)


@needs_shared
def test_the_whole_of_gnmt_is_over_a_smaller_budget():
    """17,000 downsets: within the default, not within 5,000."""
    profile = read_profile(SHARED / "piper" / "gnmt.json")
    cost = CostModel(profile, Cluster.preset("summit:2x4"))
    with pytest.raises(BudgetError, match="5,001 downsets"):
        Piper(budget=5_000)(cost, batch_size=64)
