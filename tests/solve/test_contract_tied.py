"""Operators that share a parameter as one operator: which come along, and that nothing is lost."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.cost import CostModel
from anabranch.errors import InfeasiblePlanError
from anabranch.planner.partitions import partitions
from anabranch.plans.stages import Stage, StageGraph
from anabranch.solve.contract_tied import contract, contract_tied, tied
from tests.planner.helpers import cluster as devices_of
from tests.simulator.helpers import chain, cluster, cost_model
from tests.solve.helpers import asynchronous
from tests.strategies import planning_profiles

TOWERS = ((0, 2), (1, 3), (2, 4), (3, 4))
"""Embeddings 0 and 1, towers 2 and 3, the join 4."""


def operators(profile) -> list[tuple[str, ...]]:
    """Per operator of the smaller model, the operators it stands for."""
    found = contract_tied(profile)
    return [profile.graph.names(mask) for mask in found.masks]


def model(edges, count: int, tied_ones, devices: int = 4):
    """Equal operators of 1 + 2 s per sample."""
    machines = cluster(devices)
    return cost_model(
        edges, [1.0] * count, [2.0] * count, machines, parameter_bytes=100, tied=tied_ones
    )


def test_what_lies_between_comes_along():
    """Of a chain of four whose first and third are tied, the second lies on the way."""
    assert operators(model(chain(4), 4, (0, 2)).profile) == [("op0", "op1", "op2"), ("op3",)]


def test_two_embeddings_leave_their_towers_alone():
    """There is no path between them, so only they are one; what follows is in order."""
    found = operators(model(TOWERS, 5, (0, 1)).profile)
    assert found == [("op0", "op1"), ("op2",), ("op3",), ("op4",)]


def test_a_circle_becomes_one_operator():
    """{0, 3} and {1, 2} with 0 -> 1 and 2 -> 3: neither could come first."""
    graph = model(((0, 1), (2, 3)), 4, ()).profile
    assert contract(graph, [0b1001, 0b0110]).masks == (0b1111,)


def test_sets_that_overlap_become_one():
    """Two parameters with a reader in common."""
    profile = model(((0, 3), (1, 3), (2, 3)), 4, ()).profile
    assert contract(profile, [0b0011, 0b0110]).masks == (0b0111, 0b1000)


def test_frozen_parameters_tie_nothing():
    """They never change, so copies of them stay equal."""
    profile = model(chain(3), 3, (0, 2)).profile
    frozen = tuple(replace(p, trainable=False) for p in profile.graph.parameters)
    profile = replace(profile, graph=replace(profile.graph, parameters=frozen))
    assert tied(profile.graph) == []
    assert contract_tied(profile).profile is profile


@settings(max_examples=60)
@given(st.data())
def test_stages_cost_what_they_cost_in_the_whole_model(data):
    """Seconds, memory and traffic of every stage of every partition, and it is a partition."""
    profile = data.draw(planning_profiles(max_ops=6, series_parallel=False))
    everything = (1 << len(profile.graph)) - 1
    sets = data.draw(st.lists(st.integers(1, everything), max_size=2))
    found = contract(profile, sets)
    whole = CostModel(profile, devices_of(4))
    fewer = CostModel(found.profile, devices_of(4))
    assert sum(found.masks) == everything
    for mask in sets:
        assert any(mask & ~group == 0 for group in found.masks)
    for masks, pairs in partitions(fewer):
        graph = StageGraph(
            tuple(Stage(fewer.graph.names(m), (s,), 2) for s, m in enumerate(masks)),
            tuple(sorted(pairs)),
            4,
        )
        for ours, theirs in zip(found.expand(graph).stages, graph.stages, strict=True):
            a = [whole.graph.index[name] for name in ours.operators]
            b = [fewer.graph.index[name] for name in theirs.operators]
            assert whole.forward_s(a, 2) == pytest.approx(fewer.forward_s(b, 2))
            assert whole.backward_s(a, 2) == pytest.approx(fewer.backward_s(b, 2))
            inside = whole.graph.mask(ours.operators), fewer.graph.mask(theirs.operators)
            assert whole.border(inside[0]) == fewer.border(inside[1])
            sizes = {"microbatch_size": 2, "replicas": 1, "in_flight": 3}
            assert whole.device_bytes(a, **sizes) == fewer.device_bytes(b, **sizes)


@pytest.mark.parametrize("planner", ["graphpipe", "pipedream", "sequential", "dapple", "piper"])
def test_every_planner_keeps_tied_operators_together(planner):
    """Four stages on four devices, though a planner of the whole model would cut between them."""
    cost = model(TOWERS, 5, (0, 1))
    plan = asynchronous(cost, 4, planner=planner, policy="stash", max_replicas=1)
    stages = {stage.operators for stage in plan.stage_graph.stages}
    assert ("op0", "op1") in stages
    assert len(stages) == 4
    assert any("op0 and op1 read parameter tied" in note for note in plan.notes)


def test_without_enough_stages_the_parameter_is_named():
    """A chain tied at its ends is one stage, which two devices cannot share without replicas."""
    cost = model(chain(4), 4, (0, 3), devices=2)
    with pytest.raises(InfeasiblePlanError) as refused:
        asynchronous(cost, 4, policy="stash", max_replicas=1)
    assert "op0 and op3 read parameter tied" in str(refused.value)
    assert "the 2 operators around them" in str(refused.value)
    assert len(asynchronous(cost, 4, policy="stash").stage_graph) == 1
