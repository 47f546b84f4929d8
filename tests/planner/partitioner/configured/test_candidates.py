"""Micro-batch sizes and k per stage: the best of all configurations, one by one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.cluster import Cluster
from anabranch.cost import CostModel
from anabranch.errors import BudgetError
from anabranch.graph.opgraph import Op, OpGraph, Parameter, Value, bits
from anabranch.planner.graphpipe import GraphPipe
from anabranch.planner.partitioner.configured.candidates import Search, configured
from anabranch.planner.partitioner.configured.menu import Configs
from anabranch.planner.partitioner.problem import Problem
from anabranch.planner.toolkit.assemble import Candidate
from anabranch.planner.toolkit.parts import Part, PartPrices
from anabranch.planner.toolkit.prices import Bound
from anabranch.plans.check import check
from anabranch.plans.in_flight import least_in_flight
from anabranch.plans.stages import Stage, StageGraph
from anabranch.profile.profile import OpCost, Profile, Sharded
from anabranch.schedule import schedule_of
from anabranch.schedule.kfkb import KFKB
from anabranch.simulator.costs import ModelCosts
from anabranch.simulator.run import run
from anabranch.solve import plan
from tests.planner import shapes
from tests.planner.helpers import cluster, cost_model, expressible
from tests.strategies import planning_profiles


def problem(cost: CostModel, batch_size: int, max_replicas: int | None = None) -> Problem:
    """What graphpipe searches, to the last digit."""
    return GraphPipe(max_replicas=max_replicas, tolerance=0.0).problem(cost, batch_size)


def search(given: Problem, sizes: Sequence[int], *, kfkb: bool = False) -> Search:
    return Search(given, sizes, kfkb=kfkb, budget=10**9)


def paces(given: Problem, partition: Sequence[int], pairs: Sequence[tuple[int, int]]) -> float:
    """The least seconds per sample of a partition with these configurations."""
    total = given.cost.cluster.num_devices
    graph = StageGraph(
        tuple(
            Stage(given.cost.graph.names(mask), (s,), b, k)
            for s, (mask, (b, k)) in enumerate(zip(partition, pairs, strict=True))
        ),
        stage_edges(given.cost, partition),
        given.batch_size,
    )
    options = []
    for mask, (b, _), held in zip(partition, pairs, least_in_flight(graph), strict=True):
        prices = given.prices(b)
        parts = PartPrices(prices)
        each = []
        for mode in prices.modes:
            need = given.cost.device_bytes(
                bits(mask),
                microbatch_size=-(-b // mode.replicas) * mode.replicas,
                replicas=mode.replicas,
                in_flight=held,
                recompute=mode.recompute,
                tensor=mode.tensor,
            )
            if need <= given.cost.cluster.memory_bytes:
                part = Part(mask, mode.replicas, mode.recompute, mode.tensor)
                each.append((parts.period_s(part) / b, mode.devices))
        options.append(each)
    if not all(options):
        return math.inf
    for bound in sorted({pace for each in options for pace, _ in each}):
        fewest = [
            min((d for pace, d in each if pace <= bound), default=total + 1) for each in options
        ]
        if sum(fewest) <= total:
            return bound
    return math.inf


def stage_edges(cost: CostModel, masks: Sequence[int]) -> tuple[tuple[int, int], ...]:
    home = {op: s for s, mask in enumerate(masks) for op in bits(mask)}
    pairs = {(home[a], home[b]) for a, b in cost.graph.edges}
    return tuple(sorted((x, y) for x, y in pairs if x != y))


def ordered(cost: CostModel, masks: Sequence[int]) -> tuple[int, ...]:
    """In topological order: by the place of the last operator, ancestors first."""
    left, done, result = list(masks), 0, []
    while left:
        mask = next(
            m for m in left if all(not cost.graph.ancestors[i] & ~(done | m) for i in bits(m))
        )
        left.remove(mask)
        done |= mask
        result.append(mask)
    return tuple(result)


def brute(given: Problem, configs: Configs) -> float:
    """The least seconds per sample of all partitions and configurations, one by one."""
    least = math.inf
    for partition in {ordered(given.cost, masks) for masks in expressible(given.chain)}:
        for pairs in product(configs.pairs, repeat=len(partition)):
            least = min(least, paces(given, partition, pairs))
    return least


def agree(found: float | None, expected: float) -> None:
    assert (math.inf if found is None else found) == pytest.approx(expected, rel=1e-9)


@settings(max_examples=40, deadline=None)
@given(planning_profiles(4), st.integers(1, 4), st.booleans(), st.integers(8, 60))
def test_equals_the_best_of_all_configurations(profile, devices, kfkb, memory):
    """Under any memory, on any series-parallel graph of four operators; sizes 1, 2 and 4.

    The stages behind it keep within the bound and the devices.
    """
    given = problem(cost_model(profile, devices, memory=memory), 8)
    searching = search(given, [1, 2, 4], kfkb=kfkb)
    found = searching.least_bound()
    agree(found, brute(given, Configs.of([1, 2, 4], 8, kfkb=kfkb)))
    if found is not None:
        stages = {each.mask: each for each in searching.stages(found)}
        order = ordered(given.cost, list(stages))
        pairs = [(stages[mask].microbatch_size, stages[mask].k) for mask in order]
        assert sum(each.mode.devices for each in stages.values()) <= devices
        assert sum(order) == (1 << len(profile.graph)) - 1
        assert paces(given, order, pairs) <= found * (1 + 1e-9)


@settings(max_examples=60, deadline=None)
@given(planning_profiles(5), st.integers(1, 6), st.sampled_from([1, 2, 4, 8]), st.integers(8, 90))
def test_without_options_it_is_the_plain_search(profile, devices, size, memory):
    """One micro-batch size and k = 1: the least period is that of ``reach``."""
    given = problem(cost_model(profile, devices, memory=memory, bandwidth=4.0), 8)
    found = search(given, [size]).least_bound()

    def enough(period_s: float) -> bool:
        reach = given.reach(given.prices(size))
        return int(reach.solve([Bound(period_s)]).devices[0, 0]) <= devices

    if found is None:
        assert not enough(1e9)
    else:
        assert enough(found * size * (1 + 1e-9))
        assert not enough(found * size * (1 - 1e-6))


def chain(
    seconds: Sequence[Sequence[int]], kept: Sequence[int], sent: int = 0, *, grad: bool = True
) -> Profile:
    """Operators in a row: forward seconds at 1, 2 and 4 samples, bytes kept per sample."""
    n = len(seconds)
    graph = OpGraph(
        tuple(Op(f"op{i}") for i in range(n)),
        tuple(Value(i, (i + 1,), sent if i == 0 else 0, grad=grad) for i in range(n - 1)),
    )
    costs = tuple(
        OpCost(tuple(map(float, each)), tuple(map(float, each)), k)
        for each, k in zip(seconds, kept, strict=True)
    )
    return Profile(graph, (1, 2, 4), costs, device="cpu", source="measured")


FIGURE_5 = chain([[1, 2, 4], [2, 2, 4], [4, 4, 4]], [1, 1, 1])
"""The smallest efficient micro-batches of the stages are 1, 2 and 4 samples."""


def straight(cost: CostModel, batch_size: int) -> Problem:
    """No replicas, no recomputation."""
    return replace(problem(cost, batch_size, max_replicas=1), recompute=False)


def held(graph: StageGraph) -> list[int]:
    """Samples in flight."""
    counts = zip(least_in_flight(graph), graph.stages, strict=True)
    return [count * stage.microbatch_size for count, stage in counts]


def test_figure_5():
    """Memory for 10 samples and not for 12: only sizes of their own are efficient everywhere.

    All efficient is 1 s forward and 1 s backward per sample.
    """
    tight = straight(cost_model(FIGURE_5, 3, memory=10), 32)
    ample = straight(cost_model(FIGURE_5, 3, memory=12), 32)
    assert search(ample, [4]).least_bound() == 2.0
    assert all(search(tight, [size]).least_bound() > 2.0 for size in (1, 2, 4))
    assert search(tight, [1, 2, 4]).least_bound() == 2.0
    uniform = candidates(ample, per_stage=False, size=4)[0].graph
    assert held(uniform) == [12, 8, 4]
    tailored = candidates(tight)[0].graph
    assert held(tailored) == [10, 8, 4]
    assert [stage.microbatch_size for stage in tailored.stages][1:] == [2, 4]
    assert simulated_s(tailored, tight.cost) < simulated_s(uniform, ample.cost)


def test_options_of_graphpipe():
    """In the memory of Figure 5, unequal sizes take little more than half of the step."""
    steps = {}
    for option in (False, True):
        found = plan(
            FIGURE_5,
            cluster(3, memory=10),
            32,
            max_replicas=1,
            schedule="1f1b",
            planner_options={"per_stage_microbatch": option, "recompute": False},
        )
        steps[option] = found.predicted.step_s
        sizes = {stage.microbatch_size for stage in found.stage_graph.stages}
        assert len(sizes) == (2 if option else 1)
    assert steps[True] < 0.6 * steps[False]


def test_options_are_off():
    """By default all stages of a proposal have one size and k = 1."""
    for graph in GraphPipe()(cost_model(FIGURE_5, 3, memory=10), batch_size=32):
        assert len({(stage.microbatch_size, stage.k) for stage in graph.stages}) == 1
        assert graph.stages[0].k == 1


def test_groups_let_a_stage_before_a_small_micro_batch_hold_less():
    """Sizes 2, 1, 2 hold 8, 4, 2 samples with k = 1, and 6, 4, 2 if the middle has k = 2.

    The middle stage cannot have size 2: it has 20 bytes and needs 4 per sample in flight, 4 of
    them, and another 4 per sample of the micro-batch that it receives ahead. The first stage keeps
    3 bytes per sample: 6 samples fit, 8 do not. One sample of the outer operators takes as long as
    two.
    """
    profile = chain([[2, 2, 4], [1, 2, 4], [2, 2, 4]], [3, 0, 0], 4, grad=False)
    given = straight(cost_model(profile, 3, memory=20), 16)
    assert search(given, [1, 2]).least_bound() > 2.0
    assert search(given, [1, 2], kfkb=True).least_bound() == 2.0
    stages = search(given, [1, 2], kfkb=True).stages(2.0)
    found = sorted((stage.mask, stage.microbatch_size, stage.k) for stage in stages)
    assert found == [(1, 2, 1), (2, 1, 2), (4, 2, 1)]


@pytest.mark.parametrize("length", [2, 3, 4])
def test_the_largest_of_the_best_groups_is_best(length):
    """The paper takes a k with the fewest samples in flight; of several, the largest is as good on
    chains as any choice of all k, and groups beyond the largest micro-batch gain nothing.
    """
    for sizes in product([1, 2, 4], repeat=length):
        most = max(sizes)
        choices = [[k for k in (1, 2, 4, 8) if k * b <= 2 * most] for b in sizes]
        best = min(first_held(sizes, k) for k in product(*choices))
        groups: list[int] = []
        for s in reversed(range(length)):
            ks = [k for k in (4, 2, 1) if k * sizes[s] <= most]
            groups.insert(0, min(ks, key=lambda k: first_held(sizes[s:], [k, *groups])))
        assert first_held(sizes, groups) == best


def first_held(sizes: Sequence[int], groups: Sequence[int]) -> int:
    """Samples that the first stage of a chain holds."""
    stages = [
        Stage((f"op{i}",), (i,), b, k) for i, (b, k) in enumerate(zip(sizes, groups, strict=True))
    ]
    edges = tuple((i, i + 1) for i in range(len(sizes) - 1))
    return held(StageGraph(tuple(stages), edges, 1024))[0]


def candidates(
    given: Problem, *, per_stage: bool = True, kfkb: bool = False, size: int | None = None
) -> list[Candidate]:
    """The best first."""
    found = configured(given, per_stage_microbatch=per_stage, kfkb=kfkb, microbatch_size=size)
    return sorted(found, key=lambda each: each.step_s)


def simulated_s(graph: StageGraph, cost: CostModel) -> float:
    """Seconds of a step with the fewest in flight; the schedule is checked on the way."""
    decided = KFKB().warm_up(graph)
    costs = ModelCosts(decided, cost)
    lowered = schedule_of(decided, "1f1b", costs.message_edges)
    return run(decided, lowered, costs).step_s


@settings(max_examples=25, deadline=None)
@given(
    planning_profiles(6, series_parallel=False),
    st.integers(1, 5),
    st.booleans(),
    st.booleans(),
    st.sampled_from([5, 8, 12]),
    st.integers(10, 90),
)
def test_candidates_can_be_run(profile, devices, per_stage, kfkb, batch_size, memory):
    """Valid, on all devices, in memory; the schedule passes its check and can be simulated.

    Also where sizes do not divide the batch and the graph is not series-parallel.
    """
    given = problem(cost_model(profile, devices, memory=memory, bandwidth=9.0), batch_size)
    for candidate in candidates(given, per_stage=per_stage, kfkb=kfkb):
        assert check(candidate.graph, given.cost) == []
        assert simulated_s(candidate.graph, given.cost) > 0
        assert per_stage or len({s.microbatch_size for s in candidate.graph.stages}) == 1
        assert kfkb or all(stage.k == 1 for stage in candidate.graph.stages)


def test_the_given_size_is_the_largest():
    """Of Figure 5 with micro-batches of up to 2 samples."""
    given = straight(cost_model(FIGURE_5, 3), 32)
    sizes = {s.microbatch_size for c in candidates(given, size=2) for s in c.graph.stages}
    assert sizes <= {1, 2}


def test_tensor_parallel_stages():
    """20 bytes of weights on devices of 25 bytes: only two devices together hold the operator."""
    graph = OpGraph((Op("op", ("w",)),), (), (Parameter("w", 20),))
    one = (OpCost((4.0, 4.0, 4.0), (4.0, 4.0, 4.0), 0),)
    half = Sharded(2, (OpCost((2.0, 2.0, 2.0), (2.0, 2.0, 2.0), 0),), (8,))
    profile = Profile(graph, (1, 2, 4), one, device="cpu", source="measured", sharded=(half,))
    found = candidates(problem(cost_model(profile, 2, memory=25), 8))
    assert found
    assert {(s.tensor, s.replicas) for c in found for s in c.graph.stages} == {(2, 1)}


@pytest.mark.parametrize(
    ("profile", "batch_size"),
    [(shapes.mmt(parts=1), 256), (shapes.dlrm(), 1024)],
    ids=["mmt", "dlrm"],
)
def test_published_models(profile, batch_size):
    """Both options at 16 devices: valid plans, some with unequal sizes."""
    cost = CostModel(profile, Cluster.preset("summit:4x4"))
    given = GraphPipe().problem(cost, batch_size)
    found = candidates(given, kfkb=True, size=32)
    assert [check(candidate.graph, cost) for candidate in found] == [[] for _ in found]
    assert any(len({s.microbatch_size for s in c.graph.stages}) > 1 for c in found)


def test_estimates_are_near_the_simulated_step():
    """Within a third, for chains with unequal sizes whose links cost nothing."""
    given = straight(cost_model(FIGURE_5, 3, memory=12), 64)
    for candidate in candidates(given):
        simulated = simulated_s(candidate.graph, given.cost)
        assert simulated / 1.33 < candidate.step_s < simulated * 1.33


def test_budget():
    """Both numbers and a way on, before memory is filled."""
    cost = CostModel(shapes.mmt(parts=1), Cluster.preset("summit:4x4"))
    given = GraphPipe().problem(cost, 256)
    message = r"more than 100,000 states .* [\d,]+ were needed .* give one micro-batch size"
    with pytest.raises(BudgetError, match=message):
        configured(
            given, per_stage_microbatch=True, kfkb=True, microbatch_size=None, budget=100_000
        )
