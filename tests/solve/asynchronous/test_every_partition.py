"""If any stage graph fits a policy and the options, one is found."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch import solve
from anabranch.cost import CostModel
from anabranch.errors import InfeasiblePlanError, InvalidPlanError, PolicyError
from anabranch.planner.graphpipe.planner import GraphPipe
from anabranch.plans.check import check
from anabranch.plans.partitions import partitions
from anabranch.plans.stages import Stage, StageGraph
from anabranch.schedule.asynchronous import split_batches, warm_up
from anabranch.simulator import stream
from anabranch.simulator.costs import ModelCosts
from anabranch.simulator.staleness import versions_of
from anabranch.solve.asynchronous.every_partition import (
    MOST_OPERATORS,
    EveryPartition,
    brought_down,
)
from anabranch.weights import policy_named
from tests.planner.helpers import cluster
from tests.simulator.helpers import chain, cost_model
from tests.simulator.helpers import cluster as machines_of
from tests.solve.helpers import asynchronous, on_chain
from tests.strategies import planning_profiles


def everything(cost: CostModel, batch_size: int, policy: str, limit: int) -> Iterator[StageGraph]:
    """Every stage graph that may run without a flush and fits, one by one."""
    rule, devices = policy_named(policy), cost.cluster.num_devices
    sizes = [b for b in range(1, batch_size + 1) if batch_size % b == 0]
    for masks, pairs in partitions(cost):
        for counts in product(range(1, limit + 1), repeat=len(masks)):
            if sum(counts) != devices:
                continue
            for size in sizes if rule.microbatches else [batch_size]:
                stages, first = [], 0
                for mask, count in zip(masks, counts, strict=True):
                    held = tuple(range(first, first + count))
                    # Recomputation takes the least memory.
                    stages.append(Stage(cost.graph.names(mask), held, size, recompute=True))
                    first += count
                graph = StageGraph(tuple(stages), tuple(sorted(pairs)), batch_size)
                try:
                    graph = warm_up(graph)
                    versions = versions_of(split_batches(graph), rule)
                    stream.require_untied(ModelCosts(graph, cost))
                except (InvalidPlanError, PolicyError):
                    continue
                if not check(graph, cost, versions):
                    yield graph


@given(st.data())
def test_what_fits_is_found(data):
    """Random small graphs, some with a tied parameter, in little memory, without many replicas."""
    profile = data.draw(planning_profiles(max_ops=5, series_parallel=data.draw(st.booleans())))
    if len(profile.graph) > 1 and data.draw(st.booleans()):
        a, b = data.draw(st.sets(st.integers(0, len(profile.graph) - 1), min_size=2, max_size=2))
        if profile.graph.parameters[a].nbytes:  # nothing is summed of one without
            ops = [*profile.graph.ops]
            ops[b] = replace(ops[b], parameters=(*ops[b].parameters, f"p{a}"))
            profile = replace(profile, graph=replace(profile.graph, ops=tuple(ops)))
    machines = cluster(data.draw(st.integers(1, 4)), memory=data.draw(st.integers(1, 120)))
    batch_size = data.draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    policy = data.draw(st.sampled_from(["naive", "stash", "vertical-sync", "2bw", "pipeoptim"]))
    limit = data.draw(st.integers(1, 3))
    cost = CostModel(profile, machines)
    there_is = next(everything(cost, batch_size, policy, limit), None)
    try:
        found = asynchronous(cost, batch_size, policy=policy, max_replicas=limit, improve=False)
    except InfeasiblePlanError:
        assert there_is is None, there_is
    else:
        assert there_is is not None or len(found.stage_graph.devices) < machines.num_devices
        assert solve.check_plan(found, profile, machines) == []


def test_operators_that_are_searched_as_one_have_their_own_places_in_memory():
    """The last of four reads a parameter of the first, and its passes take most: as one operator in
    the first place they seem to run where what the others keep is gone.
    """
    shapes = {"parameter_bytes": 4, "kept_bytes": 2, "tied": (0, 3)}
    cost = cost_model((), [1.0] * 4, [2.0] * 4, machines_of(1), **shapes)
    *others, last = cost.profile.costs
    costs = (*others, replace(last, working_bytes=9))
    cost = replace(cost, profile=replace(cost.profile, costs=costs))
    need = int(cost.device_bytes([0, 1, 2, 3], microbatch_size=6, replicas=1, in_flight=1))
    tight = [replace(cost, cluster=machines_of(1, memory_bytes=n)) for n in (need, need - 1)]
    found = asynchronous(tight[0], 6, policy="naive", improve=False)
    assert solve.check_plan(found, cost.profile, tight[0].cluster) == []
    with pytest.raises(InfeasiblePlanError):
        asynchronous(tight[1], 6, policy="naive", improve=False)


def test_a_shallow_plan_for_few_micro_batches(monkeypatch):
    """Two micro-batches, three operators side by side and a join on four devices under 2bw.

    A planner that proposes only the chain of four is no help: depth 4 takes four micro-batches.
    """
    edges = ((0, 3), (1, 3), (2, 3))
    cost = cost_model(edges, [1.0] * 4, [2.0] * 4, machines_of(4), parameter_bytes=100)

    def chain_of_four(self, cost, *, batch_size, microbatch_size=None):
        stages = tuple(Stage((f"op{i}",), (i,), microbatch_size) for i in range(4))
        return [StageGraph(stages, ((0, 1), (0, 3), (1, 2), (1, 3), (2, 3)), batch_size)]

    monkeypatch.setattr(GraphPipe, "__call__", chain_of_four)
    plan = asynchronous(cost, 2, policy="2bw", max_replicas=1, improve=False)
    assert plan.stage_graph.depth == 2
    assert plan.stage_graph.num_microbatches(0) == 2


def test_proposals_are_cut_into_enough_micro_batches(monkeypatch):
    """A planner that has a chain of four for two micro-batches alone: it runs with four."""

    def whole_halves(self, cost, *, batch_size, microbatch_size=None):
        if microbatch_size != 4:
            raise InfeasiblePlanError("only for micro-batches of four samples")
        stages = tuple(Stage((f"op{i}",), (i,), microbatch_size) for i in range(4))
        return [StageGraph(stages, ((0, 1), (1, 2), (2, 3)), batch_size)]

    monkeypatch.setattr(GraphPipe, "__call__", whole_halves)
    plan = asynchronous(on_chain(), 8, planner="sequential", policy="2bw", improve=False)
    assert [stage.microbatch_size for stage in plan.stage_graph.stages] == [2] * 4


def test_too_few_samples_are_said():
    """A chain of four has no plan under 2bw with three samples; the most that three give is."""
    with pytest.raises(InfeasiblePlanError, match=r"3 < 4; choose 4 or more micro-batches"):
        asynchronous(on_chain(), 3, policy="2bw", max_replicas=1)


def test_auto_names_what_was_tried():
    """Both policies with their reasons, though the user has named neither."""
    with pytest.raises(InfeasiblePlanError) as refused:
        asynchronous(on_chain(memory_bytes=350), 4, max_replicas=1)
    assert str(refused.value).startswith("policy auto has tried naive")
    assert "and 2bw, which cuts mini-batches" in str(refused.value)
    assert "neither has a plan. Under both" in str(refused.value)


def test_auto_takes_pieces_where_whole_mini_batches_do_not_fit():
    """8 samples of 100 bytes each are too much at once in 1300 bytes; one by one they fit."""
    cost = cost_model(
        chain(2),
        [1.0] * 2,
        [2.0] * 2,
        machines_of(2, memory_bytes=1300),
        parameter_bytes=100,
        kept_bytes=100,
    )
    options = {"max_replicas": 1, "planner_options": {"recompute": False}}
    plan = asynchronous(cost, 8, **options)
    assert plan.policy == "2bw"
    assert any("whole mini-batches do not fit" in note for note in plan.notes)
    with pytest.raises(InfeasiblePlanError):
        asynchronous(cost, 8, policy="naive", **options)


def test_auto_with_micro_batches_is_the_policy_for_them():
    """It was refused in the name of a policy that the user had not asked for."""
    plan = asynchronous(on_chain(), 8, microbatch_size=2, max_replicas=1)
    assert plan.policy == "2bw"


def test_a_large_model_is_brought_down():
    """Twenty operators in a row become eight runs of about equal work."""
    cost = on_chain(20)
    fewer = brought_down(cost.profile)
    assert len(fewer.profile.graph) == MOST_OPERATORS
    assert max(cost.forward_s[0] for cost in fewer.profile.costs) <= 4.0
    small = CostModel(fewer.profile, on_chain(4).cluster)
    found = EveryPartition(small, policy_named("stash"), 4, 1, recompute=True).propose([4])
    assert max(len(fewer.expand(graph).stages[0].operators) for graph in found) < 20
    assert not check(fewer.expand(found[0]), CostModel(cost.profile, small.cluster))


def test_branches_without_a_join_are_brought_down():
    """Where nothing flows, any two operators may be joined."""
    profile = cost_model((), [1.0] * 10, [2.0] * 10, machines_of(2)).profile
    assert len(brought_down(profile).profile.graph) == MOST_OPERATORS


def test_any_size_of_micro_batches_is_tried():
    """On one device only micro-batches of a single sample fit, eight of them, more than are tried
    where there is a choice.
    """
    cost = cost_model(
        (), [1.0], [2.0], machines_of(1, memory_bytes=750), parameter_bytes=100, kept_bytes=100
    )
    options = {"planner_options": {"recompute": False}}
    plan = asynchronous(cost, 8, policy="2bw", **options)
    assert plan.stage_graph.num_microbatches(0) == 8
