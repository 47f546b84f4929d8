"""Plans that leave devices idle."""

from dataclasses import replace

import pytest

from anabranch.cluster import Cluster, Level
from anabranch.cost import CostModel
from anabranch.planner.auto.planner import Auto
from anabranch.plans.check import check
from anabranch.plans.plan import Plan
from anabranch.solve import idle_devices, plan
from anabranch.solve.idle_devices import parts
from tests.simulator.helpers import chain, cluster, cost_model

NODES = Cluster("nodes", "v100", 10**9, (Level("node", 2, 1e15, 0.0), Level("net", 2, 10.0, 0.0)))
"""Two nodes of two devices; 10 bytes/s between the nodes."""


def one_operator(parameter_bytes: int) -> CostModel:
    """4 s forward and 6 s backward a sample: four samples take 20 s on a node."""
    return cost_model((), [4.0], [6.0], NODES, parameter_bytes=parameter_bytes)


def planned(cost: CostModel, **options):
    """The plan of ``auto`` for four samples."""
    return plan(cost.profile, cost.cluster, 4, optimizer_factor=0.0, **options)


@pytest.mark.parametrize(
    ("sizes", "counts"), [((4, 8), [16, 8, 4, 2, 1]), ((6,), [3, 1]), ((1, 3), [1])]
)
def test_parts_are_halves(sizes, counts):
    """Of nodes, then of the devices of a node."""
    levels = tuple(Level(f"l{i}", n, 1.0, 0.0) for i, n in enumerate(sizes))
    whole = Cluster("whole", "v100", 1, levels)
    assert [part.num_devices for part in parts(whole)] == counts


def test_devices_that_only_slow_a_step_down_stay_idle():
    """100 bytes of gradients between nodes take longer than a second node saves."""
    cost = one_operator(100)
    best = planned(cost)
    assert best.stage_graph.devices == (0, 1)
    assert best.predicted.step_s == pytest.approx(20.0)
    assert best.machines == cost.cluster
    assert "2 of 4 devices stay idle: with all of them a step takes longer" in best.notes
    assert best.predicted.enough_devices is None
    assert check(best.stage_graph, cost, idle=True) == []
    assert planned(cost, planner="data-parallel").stage_graph.devices == (0, 1, 2, 3)


@pytest.mark.parametrize(
    ("planner", "mode", "policy"),
    [("auto", "sync", ""), ("even", "sync", ""), ("auto", "async", "stash")],
)
def test_devices_beyond_the_operators_stay_idle(planner, mode, policy):
    """Three operators without replicas on two nodes of two: those of one node, as on it alone."""
    cost = cost_model(chain(3), [4.0] * 3, [6.0] * 3, NODES)
    options = {"planner": planner, "mode": mode, "policy": policy, "max_replicas": 1}
    best = planned(cost, **options)
    assert best.stage_graph.devices == (0, 1)
    assert best.machines == NODES
    reason = "3 operators with at most 1 replica each, which is enough for 3 of the 4 devices"
    assert f"2 of 4 devices stay idle: the model has {reason} of nodes" in best.notes
    alone = planned(replace(cost, cluster=next(parts(NODES))), **options)
    assert alone.stage_graph == best.stage_graph
    assert alone.predicted.step_s == best.predicted.step_s
    flat = Cluster("flat", "v100", 10**9, (Level("node", 4, 1e15, 0.0),))
    assert planned(replace(cost, cluster=flat), **options).stage_graph.devices == (0, 1, 2)


def test_fewer_devices_that_are_nearly_as_fast_are_told():
    """Four devices take 10 s and wait 9.6 s for 64 bytes of gradients, two of them 20 s."""
    best = planned(one_operator(64))
    assert best.stage_graph.devices == (0, 1, 2, 3)
    assert best.predicted.step_s == pytest.approx(19.6)
    assert best.predicted.enough_devices == 2
    assert best.predicted.enough_step_s == pytest.approx(20.0)
    assert "2 devices are enough for 98% of this speed, by another plan" in best.summary()


def test_nothing_is_tried_where_the_bound_excludes_it(monkeypatch):
    """Without gradients four devices are twice as fast as two."""

    def fail(*_: object) -> None:
        raise AssertionError("no search is needed")

    monkeypatch.setattr(idle_devices, "_on", fail)
    best = planned(one_operator(0))
    assert best.predicted.step_s == pytest.approx(10.0)
    assert best.predicted.enough_devices is None


def test_fewer_devices_are_not_tried_where_a_plan_is_far_from_its_bound():
    """A plan of 22 s, 2.2 times the bound: half of the devices can hardly be as fast, though their
    bound is 20 s.
    """
    cost = one_operator(0)
    whole = planned(cost)
    slow = replace(whole, predicted=replace(whole.figures, step_s=22.0))

    def fail(_: CostModel) -> Plan:
        raise AssertionError("no search is needed")

    assert idle_devices.with_fewer_devices(slow, cost, fail, fail) is slow


def test_one_device_is_tried_wherever_its_bound_allows_it():
    """Each of four operators takes 10 s a sample, and 30 s travel between two: the plan on four
    devices is far above its bound, but one device takes 160 s as its bound does.
    """
    sizes = {"parameter_bytes": 10**4, "value_bytes": 30}
    cost = cost_model(chain(4), [4.0] * 4, [6.0] * 4, cluster(4, bandwidth=1.0), **sizes)
    best = planned(cost, planner_options={"evaluations": 300})
    assert best.stage_graph.devices == (0,)
    assert best.predicted.step_s == pytest.approx(160.0)


def test_fewer_devices_are_searched_wholly_where_a_quick_search_is_nearly_as_fast():
    """Two devices take 20 s and four 17.5, 19.6 or 25 s: a quick search may miss 3 %."""
    for parameter_bytes, searches in ((50, 0), (64, 1), (100, 1)):
        cost, wholly = one_operator(parameter_bytes), list[CostModel]()
        plans = {d: _on_so_many(cost, d) for d in (1, 2, 4)}

        def search(fewer: CostModel, wholly=wholly, plans=plans) -> Plan:
            wholly.append(fewer)
            return plans[fewer.cluster.num_devices]

        def quick(fewer: CostModel, plans=plans) -> Plan:
            return plans[fewer.cluster.num_devices]

        idle_devices.with_fewer_devices(plans[4], cost, quick, search)
        assert len(wholly) == searches


def _on_so_many(cost: CostModel, devices: int) -> Plan:
    """The plan for the first devices."""
    (part,) = (part for part in (cost.cluster, *parts(cost.cluster)) if part.num_devices == devices)
    return plan(cost.profile, part, 4, optimizer_factor=0.0, planner="data-parallel")


def test_a_search_of_fewer_devices_has_less_effort():
    """A quarter of the evaluations."""
    assert idle_devices.with_less_effort(Auto(evaluations=1000)).evaluations == 250
    assert idle_devices.with_less_effort(Auto()).evaluations > 0
    assert idle_devices.with_less_effort(replace(Auto(), shape="chain")).shape == "chain"


def test_a_plan_with_idle_devices_is_improved_on_its_own():
    """Given as the start of a search, it stays on the devices that it has."""
    cost = one_operator(100)
    best = planned(cost)
    again = planned(cost, start=best)
    assert again.stage_graph.devices == (0, 1)
    assert again.predicted.step_s <= best.predicted.step_s
    assert again.machines == cost.cluster


def test_processes_on_one_machine_are_all_used():
    """As many as the user asks for."""
    cost = one_operator(100)
    local = replace(cost, cluster=replace(NODES, cores=8))
    assert planned(local).stage_graph.devices == (0, 1, 2, 3)


@pytest.mark.parametrize("has_proposal", [False, True])
def test_an_interrupt_meanwhile_keeps_the_plan_of_all_devices(has_proposal):
    """And no further search is begun."""
    cost = one_operator(64)
    whole = plan(cost.profile, cost.cluster, 4, optimizer_factor=0.0, improve=False)
    began = []

    def interrupted(fewer: CostModel):
        began.append(fewer)
        if not has_proposal:
            raise KeyboardInterrupt
        part = plan(fewer.profile, fewer.cluster, 4, optimizer_factor=0.0, improve=False)
        return replace(part, interrupted=True)

    best = idle_devices.with_fewer_devices(whole, cost, interrupted, interrupted)
    assert best.stage_graph == whole.stage_graph
    assert best.interrupted
    assert "interrupted while fewer devices were tried" in best.notes
    assert len(began) == 1
