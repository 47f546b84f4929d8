"""The same stages on other devices, and one after the other where they share cores."""

from __future__ import annotations

from dataclasses import replace

from anabranch.planner.partitioner.elsewhere import elsewhere, in_turn
from anabranch.planner.toolkit.parts import Part
from tests.planner.helpers import cluster, cost_model
from tests.planner.partitioner.test_polish import chain, stages


def test_neighbours_take_devices_in_turns():
    """Three replicas each on nodes of two: with one of each in every node no transfer leaves."""
    parts = [Part(1, 3), Part(2, 3)]
    found = elsewhere(cluster(6, node=2), parts, {(0, 1)}, [(0, 1, 2), (3, 4, 5)], [0, 1])
    assert [(0, 2, 4), (1, 3, 5)] in list(found)


def test_stages_trade_places():
    """Across nodes only: inside a node all places are alike."""
    parts = [Part(1, 1), Part(2, 1), Part(4, 1), Part(8, 1)]
    found = elsewhere(cluster(4, node=2), parts, (), [(0,), (1,), (2,), (3,)], [0])
    assert {tuple(sum(where, ())) for where in found} == {(2, 1, 0, 3), (3, 1, 2, 0)}


def test_every_device_stays_in_use_once():
    """Whatever the ways."""
    parts = [Part(1, 2), Part(2, 2), Part(4, 4)]
    where = [(0, 1), (2, 3), (4, 5, 6, 7)]
    found = list(elsewhere(cluster(8, node=2), parts, {(0, 1), (1, 2)}, where, [0, 1, 2]))
    assert found
    for each in found:
        assert sorted(sum(each, ())) == list(range(8))
        assert [len(devices) for devices in each] == [2, 2, 4]


def test_in_turn_only_where_cores_are_shared():
    """Edges from each stage to the next are added; elsewhere nothing is proposed."""
    cost = cost_model(chain([1, 1]), 2)
    graph = replace(stages(("0", (0,)), ("1", (1,))), edges=((0, 1),))
    assert in_turn(cost, [graph]) == []
    shared = replace(cost, cluster=replace(cost.cluster, cores=1))
    assert in_turn(shared, [graph]) == [graph]
