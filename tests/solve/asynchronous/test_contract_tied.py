"""Operators that share a parameter as one operator: which come along, and that nothing is lost."""

from dataclasses import replace

import pytest

from anabranch.errors import InfeasiblePlanError
from anabranch.graph.opgraph import Parameter
from anabranch.solve.asynchronous.contract_tied import because, contract_tied
from tests.simulator.helpers import chain, cluster, cost_model
from tests.solve.helpers import asynchronous

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


def test_frozen_parameters_tie_nothing():
    """They never change, so copies of them stay equal."""
    profile = model(chain(3), 3, (0, 2)).profile
    frozen = tuple(replace(p, trainable=False) for p in profile.graph.parameters)
    profile = replace(profile, graph=replace(profile.graph, parameters=frozen))
    assert profile.graph.tied == {}
    assert contract_tied(profile).profile is profile


def test_reasons_are_few_however_many_parameters_are_tied():
    """A teacher that follows its student ties every weight and bias of every layer."""
    profile = model((), 10, (0, 1)).profile
    layers = [(f"{layer}.weight", f"{layer}.bias") for layer in range(5) for _ in range(2)]
    ops = tuple(
        replace(op, parameters=names) for op, names in zip(profile.graph.ops, layers, strict=True)
    )
    parameters = tuple(Parameter(name, 4) for names in layers[::2] for name in names)
    graph = replace(profile.graph, ops=ops, parameters=parameters)
    reason = because(contract_tied(replace(profile, graph=graph)))
    assert reason.startswith("op0 and op1 read parameters 0.weight, 0.bias and are in one stage; ")
    assert reason.endswith("2.bias and are in one stage; 2 more groups share parameters")


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
    assert "all of the model, so nothing is left to cut: give each operator" in str(refused.value)
    with pytest.raises(InfeasiblePlanError, match="Under both without a flush stages cannot share"):
        asynchronous(model(chain(4), 4, (0, 3), 2), 4, policy="auto", max_replicas=1)
    assert "the 2 operators around them" in str(refused.value)
    assert len(asynchronous(cost, 4, policy="stash").stage_graph) == 1
