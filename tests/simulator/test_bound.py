"""The lower bound is one, and tight where it should be."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.plans.stages import StageGraph
from anabranch.schedule import SCHEDULES
from anabranch.simulator.bound import least_step_s
from anabranch.simulator.costs import ModelCosts
from tests.simulator.helpers import chain, cluster, cost_model, simulate, stage_graph
from tests.strategies import stage_graphs


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_tight_on_equal_chains(schedule):
    """With free links it is the closed form."""
    cost = cost_model(chain(4), [1] * 4, [2] * 4, cluster(4))
    graph = stage_graph(chain(4), [(i,) for i in range(4)], 6)
    least = least_step_s(graph, ModelCosts(graph, cost))
    assert least == simulate(graph, cost, schedule).step_s == (6 + 3) * 3


def test_includes_the_all_reduce():
    """4 s + 4 s of compute, 2 s of ring."""
    cost = cost_model((), [4], [4], cluster(2, bandwidth=4), parameter_bytes=8)
    graph = stage_graph((), [(0, 1)], 2, [2])
    assert least_step_s(graph, ModelCosts(graph, cost)) == 10


@given(stage_graphs(max_stages=5, max_replicas=3), st.sampled_from(sorted(SCHEDULES)), st.data())
def test_no_step_is_shorter(graph: StageGraph, schedule, data):
    """Otherwise pruning by it would lose the best plan."""
    seconds = st.lists(st.integers(0, 5), min_size=len(graph), max_size=len(graph))
    machines = cluster(len(graph.devices), bandwidth=8, latency_s=0.5)
    cost = cost_model(
        graph.edges, data.draw(seconds), data.draw(seconds), machines, parameter_bytes=16
    )
    stages = [(stage.devices, stage.microbatch_size) for stage in graph.stages]
    devices, sizes = zip(*stages, strict=True)
    plain = stage_graph(graph.edges, list(devices), graph.batch_size, list(sizes))
    least = least_step_s(plain, ModelCosts(plain, cost))
    assert least <= simulate(plain, cost, schedule).step_s * (1 + 1e-9)
