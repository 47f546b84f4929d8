"""What a refusal promises holds: with that memory, or on that many devices, there is a plan."""

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.cluster import Cluster
from anabranch.cost import CostModel
from anabranch.errors import InfeasiblePlanError
from anabranch.planner import PLANNERS
from anabranch.planner.exhaustive import Exhaustive
from anabranch.planner.graphpipe.planner import GraphPipe
from anabranch.planner.toolkit.infeasible import explain
from anabranch.planner.toolkit.problem import Problem
from tests.planner import shapes
from tests.planner.helpers import cost_model
from tests.strategies import planning_profiles

MMT = shapes.mmt(parts=1)


def explained(cost: CostModel) -> str:
    """Why there is no plan for a batch of 4."""
    return str(explain(Problem(cost, 4, recompute=True)))


MESSAGE = re.compile(
    r"mmt needs at least ([\d.]+) GiB per device on (\d+) devices \(micro-batch 1\); "
    r"\S+ has ([\d.]+) GiB; (\d+) devices would do"
)


def mmt_on(nodes: int, memory_gib: float) -> CostModel:
    cluster = Cluster.preset(f"summit:{nodes}x4")
    return CostModel(MMT, replace(cluster, memory_bytes=int(memory_gib * 2**30)))


@pytest.mark.parametrize("planner", [GraphPipe(), PLANNERS["sequential"]()])
def test_names_the_memory_and_the_devices_that_would_do(planner):
    """32 layers of 192 MiB with Adam are about 6 GiB in all: 1 GiB is too little on 4 devices."""
    with pytest.raises(InfeasiblePlanError) as refused:
        list(planner(mmt_on(1, 1.0), batch_size=64))
    match = MESSAGE.fullmatch(str(refused.value))
    assert match is not None, str(refused.value)
    needed, devices, there, enough = match.groups()
    assert (devices, there) == ("4", "1.00")
    assert list(planner(mmt_on(1, float(needed) + 0.05), batch_size=64))
    with pytest.raises(InfeasiblePlanError):
        list(planner(mmt_on(1, float(needed) * 0.95), batch_size=64))
    assert int(enough) <= 32
    assert list(planner(mmt_on(-(-int(enough) // 4), 1.0), batch_size=64))


def test_no_number_of_devices_helps_a_single_large_operator():
    """One table of 1 GB with its gradients and state: only memory is suggested."""
    profile = shapes.towers("tables", 0, 2, top=1)
    cost = cost_model(profile, 2, memory=2**28)
    with pytest.raises(InfeasiblePlanError, match=r"has 256\.0 MiB$"):
        list(GraphPipe()(cost, batch_size=8))


@settings(max_examples=12, deadline=None)
@given(planning_profiles(6), st.integers(1, 4), st.integers(5, 60))
def test_the_suggested_memory_suffices(profile, devices, memory):
    """Any small model that does not fit: 2% above what is suggested there is a plan."""
    cost = cost_model(profile, devices, memory=memory)
    planner = GraphPipe()
    if devices > len(profile.graph):
        return
    try:
        list(planner(cost, batch_size=4))
    except InfeasiblePlanError:
        message = explained(cost)
        if "no plan uses all" in message:
            # There is none: on fewer devices it fits, on all of them no split does.
            with pytest.raises(InfeasiblePlanError):
                list(Exhaustive(recompute=True, every=True)(cost, batch_size=4))
            return
        assert "needs at least" in message
        # GiB are too coarse for models of a few bytes: ask again where they are the unit.
        large = replace(
            profile,
            graph=replace(
                profile.graph,
                parameters=tuple(
                    replace(p, nbytes=p.nbytes << 30) for p in profile.graph.parameters
                ),
                values=tuple(replace(v, nbytes=v.nbytes << 30) for v in profile.graph.values),
            ),
            costs=tuple(replace(c, kept_bytes=c.kept_bytes << 30) for c in profile.costs),
        )
        cost = cost_model(large, devices, memory=memory << 30)
        needed = float(re.findall(r"at least ([\d.]+) GiB", explained(cost))[0])
        enough = cost_model(large, devices, memory=int((needed * 1.02 + 0.1) * 2**30))
        assert list(planner(enough, batch_size=4))


def test_says_how_many_devices_can_be_used():
    """A straight pipeline of 35 operators on 64 devices."""
    with pytest.raises(InfeasiblePlanError, match="is enough for 35 of the 64 devices"):
        list(GraphPipe(max_replicas=1)(mmt_on(16, 16.0), batch_size=64))
