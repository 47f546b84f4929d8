"""graphpipe is never behind another planner: the cases in which it once was, and drawn ones."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.cluster import Cluster, Level
from anabranch.errors import AnabranchError, InfeasiblePlanError
from anabranch.graph.opgraph import Op, OpGraph, Parameter, Value
from anabranch.planner.graphpipe import GraphPipe
from anabranch.plans.check import check
from anabranch.plans.plan import Plan
from anabranch.profile.profile import OpCost, Profile
from anabranch.solve import compare, plan
from tests.planner.helpers import cluster, cost_model, sharded
from tests.strategies import planning_profiles

OTHERS = ("sequential", "pipedream", "dapple", "piper", "even", "data-parallel")


def model(
    seconds: list[float],
    edges: list[tuple[int, int]],
    *,
    reads: list[str] | None = None,
    weights: int = 0,
    out: int = 0,
    kept: int = 0,
) -> Profile:
    """Operators with these seconds per sample; ``reads`` names the parameter of each."""
    n = len(seconds)
    names = reads or [f"w{i}" for i in range(n)]
    readers: dict[int, list[int]] = {}
    for a, b in edges:
        readers.setdefault(a, []).append(b)
    graph = OpGraph(
        tuple(Op(f"op{i}", (names[i],)) for i in range(n)),
        tuple(Value(a, tuple(b), out) for a, b in readers.items()),
        tuple(Parameter(name, weights) for name in dict.fromkeys(names)),
    )
    costs = tuple(OpCost((s,), (s,), kept) for s in seconds)
    return Profile(graph, (1,), costs, "cpu", "estimated", proportional=True)


def require_not_behind(profile: Profile, machines: Cluster, batch_size: int) -> Plan:
    """Our plan, after comparing its step with all others'."""
    ours = plan(profile, machines, batch_size)
    for name, theirs in compare(profile, machines, batch_size, OTHERS):
        if isinstance(theirs, Plan):
            step_s = theirs.predicted.step_s
            assert ours.predicted.step_s <= step_s * (1 + 1e-6) + 1e-12, name
    return ours


def test_tied_parameters_come_together():
    """Two towers of two operators that share a parameter each: the same one on the same device.

    A tower per device is as well balanced, but sums 2 * 8 bytes over a link of 1 byte/s.
    """
    profile = model([1, 1, 1, 1], [(0, 1), (2, 3)], reads=["a", "b", "a", "b"], weights=8, out=0)
    ours = require_not_behind(profile, cluster(2, bandwidth=1.0), 8)
    home = {name: s for s, stage in enumerate(ours.stage_graph.stages) for name in stage.operators}
    assert (home["op0"], home["op1"]) == (home["op2"], home["op3"])


@pytest.mark.parametrize("devices", [5, 7, 8, 9])
def test_few_samples_on_many_devices(devices):
    """Three operators and three samples: up to nine devices have work, in uneven numbers."""
    ours = require_not_behind(model([1, 2, 3], [(0, 1), (1, 2)]), cluster(devices), 3)
    assert len(ours.stage_graph.devices) == devices


def test_more_devices_than_can_have_work():
    """A tenth device would be left without a stage, which no plan may: the message says so."""
    with pytest.raises(
        InfeasiblePlanError, match=r"at most 9 of the 10 devices.*no device without"
    ):
        plan(model([1, 2, 3], [(0, 1), (1, 2)]), cluster(10), 3)


def test_the_limit_on_replicas_does_not_count_devices_of_a_replica():
    """One replica per stage, four devices, two operators: two devices hold each replica."""
    profile = sharded(model([4, 4], [(0, 1)], weights=2, kept=2))
    found = list(GraphPipe(max_replicas=1)(cost_model(profile, 4), batch_size=4))
    shapes = {tuple((s.replicas, s.tensor) for s in graph.stages) for graph in found}
    assert shapes == {((1, 2), (1, 2))}


def test_stages_in_turn_where_they_share_cores():
    """Five processes on two cores, three operators that wait for nobody and two in a row."""
    machines = Cluster("shared", "cpu", 2**34, (Level("host", 5, 1e9, 2e-4),), cores=2)
    profile = model([3e-3, 2e-3, 2e-3, 3e-3, 1e-3], [(2, 3), (3, 4)])
    ours = plan(profile, machines, 6, microbatch_size=1)
    for name, theirs in compare(profile, machines, 6, OTHERS, microbatch_size=1):
        if isinstance(theirs, Plan):
            assert ours.predicted.step_s <= theirs.predicted.step_s * (1 + 1e-6), name


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    planning_profiles(5, series_parallel=False),
    st.integers(1, 6),
    st.sampled_from([1, 3, 8]),
    st.sampled_from([1e18, 8.0]),
    st.sampled_from([60, 10**9]),
)
def test_is_never_behind(profile, devices, batch_size, bandwidth, memory):
    """Whatever limits it; and where any other planner has a plan, there is one."""
    machines = cluster(devices, bandwidth=bandwidth, memory=memory)
    try:
        require_not_behind(profile, machines, batch_size)
    except InfeasiblePlanError:
        for _, theirs in compare(profile, machines, batch_size, OTHERS):
            assert isinstance(theirs, AnabranchError)


@settings(max_examples=25, deadline=None)
@given(planning_profiles(6), st.integers(1, 4), st.sampled_from([4, 8]))
def test_no_recomputation_where_memory_is_ample(profile, devices, batch_size):
    """It costs a forward, and what it spares nobody needs."""
    try:
        ours = plan(profile, cluster(devices), batch_size)
    except InfeasiblePlanError:
        return
    assert not any(stage.recompute for stage in ours.stage_graph.stages)


@settings(max_examples=25, deadline=None)
@given(
    planning_profiles(6, series_parallel=False),
    st.sets(st.integers(0, 5)),
    st.integers(1, 5),
    st.sampled_from([1e18, 8.0]),
)
def test_operators_that_take_no_time(profile, idle, devices, bandwidth):
    """Some of them or all: a plan with a finite step, and no division by zero on the way."""
    nothing = (0.0,) * len(profile.samples)
    costs = tuple(
        OpCost(nothing, nothing, cost.kept_bytes) if i in idle else cost
        for i, cost in enumerate(profile.costs)
    )
    machines = cluster(devices, bandwidth=bandwidth)
    with np.errstate(all="raise", under="ignore"):
        try:
            ours = plan(replace(profile, costs=costs), machines, 8)
        except InfeasiblePlanError:
            return
    assert math.isfinite(ours.predicted.step_s)
    assert check(ours.stage_graph, cost_model(profile, devices, bandwidth=bandwidth)) == []
