"""The planner finds the best of the plans that it may express, and what each kind is for."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.cluster import Cluster
from anabranch.cost import CostModel
from anabranch.errors import InfeasiblePlanError
from anabranch.graph.opgraph import Op, OpGraph, Value
from anabranch.graph.series_parallel import decompose
from anabranch.planner.exhaustive import best_replicas
from anabranch.planner.graphpipe import GraphPipe
from anabranch.planner.partitioner import block_stage as beside
from anabranch.planner.partitioner.branch_shares import BranchShares
from anabranch.planner.partitioner.chains import build, count
from anabranch.planner.partitioner.limits import SEARCH
from anabranch.planner.partitioner.period_search import PeriodSearch
from anabranch.planner.partitions import partitions
from anabranch.planner.sequential import Sequential
from anabranch.planner.toolkit.parts import Part, PartPrices
from anabranch.plans.check import check
from anabranch.plans.stages import StageGraph
from anabranch.profile.profile import OpCost, Profile
from anabranch.simulator.judge import Judge
from anabranch.simulator.objective import ShortestStep
from anabranch.solve import AUTO
from tests.planner import shapes
from tests.planner.helpers import cost_model, expressible, sharded
from tests.strategies import planning_profiles


def found_period(
    cost: CostModel, batch_size: int, size: int, *, recompute: bool = False
) -> tuple[float, list[Part]]:
    """The least period that the search finds for one micro-batch size, and its stages."""
    problem = GraphPipe(recompute=recompute).problem(cost, batch_size)
    return PeriodSearch(problem, build(cost, problem.tree), [size]).least(1e-9)


def least_period(
    cost: CostModel,
    batch_size: int,
    size: int,
    masks: Iterable[tuple[int, ...]],
    *,
    recompute: bool = False,
) -> float:
    """The least period of any of these partitions, one by one."""
    prices = PartPrices(GraphPipe(recompute=recompute).problem(cost, batch_size).prices(size))
    least = math.inf
    for partition in masks:
        parts = best_replicas(prices, partition, cost.cluster.num_devices)
        if parts is not None:
            least = min(least, max(prices.period_s(part) for part in parts))
    return least


def without_values(profile: Profile) -> Profile:
    """The same with values of no bytes, so that slow links matter to all-reduces only."""
    values = tuple(replace(value, nbytes=0) for value in profile.graph.values)
    return replace(profile, graph=replace(profile.graph, values=values))


def partition_masks(cost: CostModel, batch_size: int) -> tuple[set[tuple[int, ...]], ...]:
    """Partitions that the planner may express, and all."""
    everything = {tuple(sorted(masks)): masks for masks, _ in partitions(cost)}
    chain = build(cost, GraphPipe().problem(cost, batch_size).tree)
    return {everything[tuple(sorted(m))] for m in expressible(chain)}, set(everything.values())


LIMITS = {
    "compute": {},
    "all-reduce": {"bandwidth": 4.0},
    "traffic": {"bandwidth": 3.0},
    "memory": {},
}


@settings(max_examples=60, deadline=None)
@given(
    planning_profiles(6),
    st.integers(1, 6),
    st.sampled_from([1, 2, 4, 8]),
    st.integers(1, 3),
    st.sampled_from(sorted(LIMITS)),
    st.integers(8, 80),
    st.booleans(),
)
def test_equals_the_best_expressible_plan(profile, devices, size, count, limit, memory, recompute):
    """Whatever limits it, the least period is that of the best plan out of all, one by one."""
    if limit == "all-reduce":
        profile = without_values(profile)
    tight = {"memory": memory} if limit == "memory" else {}
    cost = cost_model(profile, devices, **LIMITS[limit], **tight)
    found, _ = found_period(cost, size * count, size, recompute=recompute)
    masks, _ = partition_masks(cost, size * count)
    least = least_period(cost, size * count, size, masks, recompute=recompute)
    # Recomputation is tried only where it gains more than that.
    assert least * (1 - 1e-6) <= found <= least * (SEARCH.dearer if recompute else 1) * (1 + 1e-6)


@settings(max_examples=30, deadline=None)
@given(planning_profiles(6), st.integers(1, 6), st.sampled_from([2, 8]))
def test_is_near_the_best_of_all_plans(profile, devices, size):
    """What it cannot express costs little: nothing in 97 of 100 such graphs, 43% at worst."""
    cost = cost_model(profile, devices)
    _, everything = partition_masks(cost, size)
    least = least_period(cost, size, size, everything)
    assert least * (1 - 1e-6) <= found_period(cost, size, size)[0] <= 2 * least


@settings(max_examples=30, deadline=None)
@given(planning_profiles(10, series_parallel=False), st.integers(1, 8), st.integers(1, 12))
def test_any_graph_gets_valid_plans(profile, devices, batch_size):
    """Also where the graph is not series-parallel."""
    cost = cost_model(profile, devices)
    try:
        proposals = list(GraphPipe()(cost, batch_size=batch_size))
    except InfeasiblePlanError:
        assert devices > 1
        return
    assert [check(graph, cost) for graph in proposals] == [[] for _ in proposals]


def least_step_s(cost: CostModel, proposals: Iterable[StageGraph]) -> float:
    """The shortest simulated step."""
    judge = Judge(ShortestStep(cost, AUTO))
    judge.consider(proposals)
    return judge.best_s


@settings(max_examples=20, deadline=None)
@given(planning_profiles(8), st.integers(1, 8), st.sampled_from([4, 8, 16]))
def test_is_never_behind_sequential(profile, devices, batch_size):
    """The best of its proposals, simulated, is as good as the best sequential plan."""
    cost = cost_model(profile, devices, bandwidth=50.0)
    try:
        chains = Sequential()(cost, batch_size=batch_size)
    except InfeasiblePlanError:
        return
    own = least_step_s(cost, GraphPipe()(cost, batch_size=batch_size))
    assert own <= least_step_s(cost, chains) * (1 + 1e-9)


def test_data_parallelism_comes_first():
    """A plan is there before the search begins, and is proposed again among all others."""
    cost = CostModel(shapes.mmt(parts=1), Cluster.preset("summit:2x4"))
    proposals = list(GraphPipe()(cost, batch_size=128))
    assert len(proposals[0]) == 1
    assert proposals[0] in proposals[1:]
    assert len(set(proposals)) <= 2 * GraphPipe().candidates


def test_recomputes_where_memory_is_short():
    """Layers that keep more than a device holds: with recomputation there is a plan."""
    profile = shapes.mmt(branches=2, layers=4, parts=1)
    kept = tuple(replace(cost, kept_bytes=40 * cost.kept_bytes) for cost in profile.costs)
    cost = cost_model(replace(profile, costs=kept), 4, memory=25 * 10**8)
    with pytest.raises(InfeasiblePlanError, match=r"needs at least .* GiB"):
        list(GraphPipe(recompute=False)(cost, batch_size=64, microbatch_size=16))
    found = list(GraphPipe()(cost, batch_size=64, microbatch_size=16))
    assert any(stage.recompute for graph in found for stage in graph.stages)
    assert [check(graph, cost) for graph in found] == [[] for _ in found]


def test_does_not_recompute_where_memory_is_ample():
    """It costs a forward."""
    cost = CostModel(shapes.mmt(parts=1), Cluster.preset("summit:2x4"))
    proposals = list(GraphPipe()(cost, batch_size=128))
    assert not any(stage.recompute for graph in proposals[-5:] for stage in graph.stages)


def test_tensor_groups_lie_inside_nodes():
    """One sample, two operators, four devices: each replica is spread over a node of two."""
    profile = sharded(drawn({"a": 4, "b": 4}, {"b": "a"}, out=1))
    cost = cost_model(profile, 4, node=2)
    proposals = list(GraphPipe()(cost, batch_size=4, microbatch_size=1))
    assert [check(graph, cost) for graph in proposals] == [[] for _ in proposals]
    best = [(stage.tensor, stage.devices) for stage in proposals[-1].stages]
    assert best == [(2, (0, 1)), (2, (2, 3))]


@settings(max_examples=30, deadline=None)
@given(planning_profiles(6), st.integers(1, 6), st.sampled_from([1, 2, 4]))
def test_least_period_with_tensor_groups(profile, devices, size):
    """As the best expressible plan out of all, each stage in any mode."""
    cost = cost_model(sharded(profile), devices, node=None)
    found, _ = found_period(cost, size, size)
    masks, _ = partition_masks(cost, size)
    assert found == pytest.approx(least_period(cost, size, size, masks), rel=1e-6)


@pytest.mark.parametrize("branches", [0, 8], ids=["row", "branches"])
def test_large_models(branches):
    """Of 600 operators on 256 devices: valid plans from tables of bounded size."""
    layers = 600 // max(1, branches)
    profile = shapes.towers("large", max(1, branches), 0, layers=layers, width=2048, top=1)
    assert len(profile.graph) > 600
    cost = CostModel(profile, Cluster.preset("summit:64x4"))
    assert count(build(cost, decompose(profile.graph))) <= 2 * SEARCH.items
    proposals = list(GraphPipe()(cost, batch_size=4096, microbatch_size=256))
    assert [check(graph, cost) for graph in proposals] == [[] for _ in proposals]
    assert max(len(graph) for graph in proposals) > 8


def first_stages(profile: Profile, devices: int, size: int, **options: object) -> list[str]:
    """The stages at the least period, as operators x replicas, in topological order."""
    cost = cost_model(profile, devices, **options)
    _, parts = found_period(cost, size, size)
    problem = GraphPipe().problem(cost, size)
    found = problem.assembler(size).assemble(parts)
    assert found is not None
    graph = found.graph
    return [f"{'+'.join(s.operators)} x{s.replicas}" for s in graph.stages]


def drawn(times: dict[str, int], reads: dict[str, str], out: int = 0) -> Profile:
    """A model by hand: seconds per sample of each operator, and whom it reads."""
    names = list(times)
    readers: dict[str, list[int]] = {}
    for reader, sources in reads.items():
        for source in sources.split():
            readers.setdefault(source, []).append(names.index(reader))
    values = tuple(Value(names.index(a), tuple(sorted(b)), out) for a, b in readers.items())
    costs = tuple(OpCost((float(t),), (0.0,), 0) for t in times.values())
    graph = OpGraph(tuple(Op(name) for name in names), values)
    return Profile(graph, (1,), costs, device="cpu", source="measured", proportional=True)


Y_SHAPE = {"a2": "a1", "b2": "b1", "join": "a2 b2", "loss": "join"}


def test_branches_run_side_by_side():
    """Two branches of two equal operators and a head as long as one, one device each."""
    times = {"a1": 1, "a2": 1, "b1": 1, "b2": 1, "join": 1}
    reads = {"a2": "a1", "b2": "b1", "join": "a2 b2"}
    cost = cost_model(drawn(times, reads), 5)
    best, in_turn = list(GraphPipe(max_replicas=1)(cost, batch_size=4, microbatch_size=1))[-2:]
    assert [s.operators for s in best.stages] == [("a1",), ("a2",), ("b1",), ("b2",), ("join",)]
    assert best.edges == ((0, 1), (1, 4), (2, 3), (3, 4))
    assert best.depth == 3
    assert in_turn.stages == best.stages
    assert in_turn.depth == 5


def test_join_takes_the_tail_of_a_branch():
    """Two branches of 3 s on three devices: a head of no work takes a second of each."""
    times = {"a1": 2, "a2": 1, "b1": 2, "b2": 1, "join": 0, "loss": 0}
    assert first_stages(drawn(times, Y_SHAPE), 3, 1) == ["a1 x1", "b1 x1", "a2+b2+join+loss x1"]


def test_source_takes_the_heads_of_branches():
    """A stem of no work does not get a device of its own."""
    times = {"stem": 0, "a1": 1, "a2": 2, "b1": 1, "b2": 2, "join": 2}
    reads = {"a1": "stem", "a2": "a1", "b1": "stem", "b2": "b1", "join": "a2 b2"}
    stages = first_stages(drawn(times, reads), 4, 1)
    assert stages == ["stem+a1+b1 x1", "a2 x1", "b2 x1", "join x1"]


def test_several_branches_in_one_stage():
    """Seven branches on four devices: three pairs, and the seventh with the head."""
    times = {f"b{i}": 2 for i in range(7)} | {"join": 2}
    reads = {"join": " ".join(f"b{i}" for i in range(7))}
    stages = first_stages(drawn(times, reads), 4, 1)
    assert stages == ["b0+b1 x1", "b2+b3 x1", "b4+b5 x1", "b6+join x1"]


def test_fan_in_moves_the_join():
    """Where the join's card is the bottleneck, its stage takes over what it would receive.

    Two nodes of one device. Each branch sends 8 bytes per sample at 1 byte/s and gets as many
    back; a branch on the join's device sends nothing, so the join goes with one of them.
    """
    times = {"a": 4, "b": 4, "join": 4}
    profile = drawn(times, {"join": "a b"}, out=8)
    assert first_stages(profile, 2, 1, node=1, card=1.0) == ["a x1", "b+join x1"]


def test_depth_is_traded_for_the_period():
    """Few micro-batches: a shallow plan is among the proposals, and the deep one too, whose period
    is two thirds of that.
    """
    profile = shapes.mmt(branches=2, layers=8, parts=1)
    cost = CostModel(profile, Cluster.preset("summit:4x4"))
    depths = {graph.depth for graph in GraphPipe()(cost, batch_size=128, microbatch_size=32)}
    assert min(depths) == 1
    assert max(depths) >= 3


@pytest.mark.parametrize(
    ("profile", "batch_size"),
    [(shapes.mmt(parts=1), 64), (shapes.dlrm(), 2048), (shapes.candle_uno(), 32768)],
    ids=["mmt", "dlrm", "candle-uno"],
)
def test_published_models(profile, batch_size):
    """The models of the paper at 32 devices, mmt with few samples for each: valid plans, wider and
    shallower than a chain.
    """
    cost = CostModel(profile, Cluster.preset("summit:8x4"))
    proposals = list(GraphPipe()(cost, batch_size=batch_size))
    assert [check(graph, cost) for graph in proposals] == [[] for _ in proposals]
    judge = Judge(ShortestStep(cost, AUTO))
    judge.consider(proposals)
    assert judge.best is not None
    assert judge.best.graph.depth < len(judge.best.graph)


def test_search_grows_no_worse_than_quadratically(monkeypatch):
    """From 4 to 256 devices the entries of all tables grow by less than the square of 64."""
    entries = []

    class Counted(BranchShares):
        def __init__(self, *args: object) -> None:
            super().__init__(*args)
            entries.append(sum(table.size for sums in self._sums for table in sums.values()))

    monkeypatch.setattr(beside, "BranchShares", Counted)
    profile = shapes.mmt(parts=1)
    work = {}
    for nodes in (1, 64):
        entries.clear()
        cost = CostModel(profile, Cluster.preset(f"summit:{nodes}x4"))
        problem = GraphPipe().problem(cost, 4 * 256)
        PeriodSearch(problem, build(cost, problem.tree), [16]).least(0.01)
        work[nodes] = sum(entries)
    assert work[64] < 64**2 * work[1]
