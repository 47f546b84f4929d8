"""What lies near a plan is valid, differs from it, and contains what an eye would try."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.cost import CostModel
from anabranch.errors import InfeasiblePlanError
from anabranch.graph.opgraph import Op, OpGraph, Parameter, Value
from anabranch.graph.series_parallel import decompose, operators
from anabranch.planner import PLANNERS
from anabranch.planner.partitioner.polish.operators import slides
from anabranch.planner.partitioner.polish.plan_view import PlanView
from anabranch.planner.partitioner.polish.polisher import Polisher
from anabranch.planner.toolkit.assemble import Assembler
from anabranch.planner.toolkit.parts import Part, PartPrices
from anabranch.planner.toolkit.prices import MicrobatchPrices
from anabranch.planner.toolkit.problem import Problem
from anabranch.plans.check import check
from anabranch.plans.stages import Stage, StageGraph
from anabranch.profile.profile import OpCost, Profile
from tests.planner.helpers import cluster, cost_model
from tests.strategies import planning_profiles


def chain(seconds: list[int], *, kept: int = 0) -> Profile:
    """Operators in a row; backward takes as long as forward."""
    n = len(seconds)
    graph = OpGraph(
        tuple(Op(f"op{i}", (f"p{i}",)) for i in range(n)),
        tuple(Value(i, (i + 1,), 1) for i in range(n - 1)),
        tuple(Parameter(f"p{i}", 1) for i in range(n)),
    )
    costs = tuple(OpCost((s,), (s,), kept) for s in seconds)
    return Profile(graph, (1,), costs, "cpu", "estimated", proportional=True)


def near(
    cost: CostModel, graph: StageGraph, *, simulated: int = 1000, **options: object
) -> list[StageGraph]:
    """All neighbours of a stage graph."""
    microbatch_size = options.pop("microbatch_size", None)
    problem = Problem(cost, graph.batch_size, **{"recompute": True, **options})
    return Polisher(problem, microbatch_size, simulated=simulated)(graph)


def assembler(cost: CostModel, size: int = 1, batch: int = 8) -> Assembler:
    """What makes stage graphs at one micro-batch size."""
    prices = MicrobatchPrices(cost, batch, size, (1,), cost.cluster.memory_bytes)
    order = tuple(operators(decompose(cost.graph)))
    return Assembler(PartPrices(prices), order, cost.cluster.num_devices)


def stages(*contents: tuple[str, tuple[int, ...]], size: int = 1, batch: int = 8) -> StageGraph:
    """A row of stages: operators by their numbers, devices."""
    made = tuple(
        Stage(tuple(f"op{digit}" for digit in ops), devices, size) for ops, devices in contents
    )
    return StageGraph(made, tuple((i, i + 1) for i in range(len(made) - 1)), batch)


@settings(max_examples=40, deadline=None)
@given(
    profile=planning_profiles(6, series_parallel=False),
    devices=st.integers(1, 6),
    batch_size=st.integers(1, 8),
    memory=st.sampled_from([100, 10**9]),
)
def test_neighbours_are_valid(profile, devices, batch_size, memory):
    """Whatever the graph, the batch and the memory: partitions, convex, on all devices, fitting."""
    cost = cost_model(profile, devices, memory=memory, node=devices // 2 or None)
    cost = cost if cost.cluster.num_devices == devices else cost_model(profile, devices)
    try:
        start = next(iter(PLANNERS["even"]()(cost, batch_size=batch_size)))
    except InfeasiblePlanError:
        return
    for graph in near(cost, start):
        assert check(graph, cost) == []
        assert graph.batch_size == batch_size


def test_an_operator_goes_to_the_stage_that_has_less_to_do():
    """Of 3 + 1 seconds the second stage should have one operator more."""
    cost = cost_model(chain([1, 1, 1, 1]), 2)
    best = near(cost, stages(("012", (0,)), ("3", (1,))), microbatch_size=1)[0]
    assert [stage.operators for stage in best.stages] == [("op0", "op1"), ("op2", "op3")]


def test_devices_go_where_the_work_is():
    """9 and 3 seconds on 2 + 2 devices are better served by 3 + 1."""
    cost = cost_model(chain([9, 3]), 4)
    found = near(cost, stages(("0", (0, 1)), ("1", (2, 3)), size=6, batch=48), microbatch_size=6)
    assert [3, 1] in [[stage.replicas for stage in graph.stages] for graph in found[:2]]


def test_stages_become_one_and_two():
    """Data parallelism is a merge away, and a pipeline a split; both take about 64 seconds."""
    cost = cost_model(chain([1, 1]), 2)
    one = stages(("01", (0, 1)), size=2, batch=64)
    two = stages(("0", (0,)), ("1", (1,)), size=2, batch=64)
    assert [s.operators for s in one.stages] in [
        [s.operators for s in graph.stages] for graph in near(cost, two)
    ]
    assert [s.operators for s in two.stages] in [
        [s.operators for s in graph.stages] for graph in near(cost, one)
    ]


def test_recomputation_is_tried_and_can_be_forbidden():
    """It costs time, so it comes last where memory is plenty."""
    cost = cost_model(chain([1, 1]), 2)
    start = stages(("0", (0,)), ("1", (1,)), batch=1)
    assert not any(s.recompute for g in near(cost, start, recompute=False) for s in g.stages)
    tight = CostModel(chain([1, 1], kept=30), cluster(2, memory=36), optimizer_factor=1.0)
    big = stages(("0", (0,)), ("1", (1,)), size=1, batch=4)
    assert all(check(graph, tight) == [] for graph in near(tight, big))


def test_the_microbatch_size_can_be_fixed():
    """Otherwise twice and half of it are tried."""
    cost = cost_model(chain([1, 1]), 2)
    start = stages(("0", (0,)), ("1", (1,)), size=2, batch=64)
    free, fixed = (
        {s.microbatch_size for g in near(cost, start, max_replicas=1, **one) for s in g.stages}
        for one in ({}, {"microbatch_size": 2})
    )
    assert fixed == {2}
    assert 1 in free


def test_stages_trade_places_between_nodes():
    """On two nodes of two devices neighbours that exchange much should share a node."""
    profile = chain([1, 1, 1, 1])
    values = tuple(
        Value(v.producer, v.consumers, 100 if v.producer in (0, 2) else 1)
        for v in profile.graph.values
    )
    graph = OpGraph(profile.graph.ops, values, profile.graph.parameters)
    heavy = Profile(graph, (1,), profile.costs, "cpu", "estimated", proportional=True)
    cost = cost_model(heavy, 4, node=2, card=10.0)
    apart = stages(("0", (0,)), ("1", (2,)), ("2", (1,)), ("3", (3,)))
    best = near(cost, apart, microbatch_size=1)[0]
    node = {name: stage.devices[0] // 2 for stage in best.stages for name in stage.operators}
    assert node["op0"] == node["op1"]
    assert node["op2"] == node["op3"]


def test_holders_of_a_parameter_come_together():
    """Three operators side by side, the first and the last tied: as well balanced together."""
    graph = OpGraph(
        (Op("op0", ("a",)), Op("op1", ("b",)), Op("op2", ("a",))),
        (),
        (Parameter("a", 100), Parameter("b", 100)),
    )
    costs = tuple(OpCost((1,), (1,), 0) for _ in range(3))
    profile = Profile(graph, (1,), costs, "cpu", "estimated", proportional=True)
    row = replace(stages(("01", (0,)), ("2", (1,))), edges=())
    best = near(cost_model(profile, 2, bandwidth=10.0), row, microbatch_size=1)[0]
    assert {stage.operators for stage in best.stages} == {("op0", "op2"), ("op1",)}


def test_recomputes_only_where_memory_is_short():
    """A row of three on ample memory: no neighbour recomputes."""
    cost = cost_model(chain([1, 1, 1], kept=1), 3)
    found = near(cost, stages(("0", (0,)), ("1", (1,)), ("2", (2,))))
    assert found
    assert not any(stage.recompute for graph in found for stage in graph.stages)


def test_cuts_of_a_row_move_far():
    """Twelve equal operators cut after the first: half of them are more than two steps away."""
    cost = cost_model(chain([1] * 12), 2)
    row = PlanView(assembler(cost), (Part(0b1, 1), Part(0b111111111110, 1)))
    assert (Part(0b11111, 1), Part(0b111111100000, 1)) in list(slides(row))


def test_one_stage_becomes_several_at_any_microbatch_size():
    """All samples at once leave nothing to overlap; fewer do, on 4 + 4 devices or 4 + 2 + 1 + 1."""
    cost = cost_model(chain([4, 2, 1, 1]), 8)
    start = stages(("0123", tuple(range(8))), size=256, batch=256)
    found = near(cost, start, simulated=10_000)
    shapes = {tuple(stage.replicas for stage in graph.stages) for graph in found}
    assert {(4, 4), (4, 2, 2), (4, 2, 1, 1)} <= shapes
    assert min(stage.microbatch_size for graph in found for stage in graph.stages) < 16


def test_there_is_an_end_to_it():
    """Whatever is asked for: after so many stages were priced nothing is proposed any more."""
    names = "0123456789"
    starts = [
        stages(
            (names[:a], (0, 1, 2)),
            (names[a:b], (3, 4)),
            (names[b:], (5, 6, 7)),
            size=size,
            batch=64,
        )
        for a in range(1, 8)
        for b in range(a + 1, 9)
        for size in (4, 8, 16)
    ]
    cost = cost_model(chain([1, 2, 3, 4, 5, 5, 4, 3, 2, 1]), 8)
    polisher = Polisher(Problem(cost, 64, recompute=True), None)
    counts = [len(polisher(start)) for start in starts]
    assert counts[0] > 0
    assert counts[-1] == 0
