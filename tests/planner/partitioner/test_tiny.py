"""All partitions of a few operators."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.planner.graphpipe import GraphPipe
from anabranch.planner.partitioner.tiny import tiny
from anabranch.planner.partitions import partitions
from anabranch.plans.check import check
from tests.planner.helpers import cost_model
from tests.planner.partitioner.test_polish import chain
from tests.strategies import planning_profiles


@settings(max_examples=25, deadline=None)
@given(
    profile=planning_profiles(5, series_parallel=False),
    devices=st.integers(1, 6),
    batch_size=st.integers(1, 8),
    memory=st.sampled_from([60, 10**9]),
)
def test_candidates_are_valid(profile, devices, batch_size, memory):
    """On all devices, in memory, whatever the model."""
    cost = cost_model(profile, devices, memory=memory)
    for candidate in tiny(GraphPipe().problem(cost, batch_size), None):
        assert check(candidate.graph, cost) == []


def test_tiny_has_every_partition():
    """Three operators in a row on three devices, one replica each: all four ways but one stage."""
    cost = cost_model(chain([1, 1, 1]), 2)
    problem = GraphPipe(max_replicas=1).problem(cost, 4)
    found = {frozenset(stage.operators for stage in each.graph.stages) for each in tiny(problem, 1)}
    assert found == {
        frozenset({("op0",), ("op1", "op2")}),
        frozenset({("op0", "op1"), ("op2",)}),
    }
    # The fourth would put op0 and op2 together, with op1 between them; the fifth is one stage.
    assert len(list(partitions(cost))) == 4
