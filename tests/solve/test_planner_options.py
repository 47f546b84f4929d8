"""What a planner can be told, and the bottleneck of what it proposes."""

import pytest

from anabranch.plans.prices import bottleneck_s_per_sample
from anabranch.solve import options_of
from tests.simulator.helpers import chain, cluster, cost_model, stage_graph
from tests.solve.helpers import Limited, Published, found, two_stages


def test_options_of_a_planner(propose):
    """By the names of its fields; an unknown name or another kind of value is refused."""
    cost, graph = two_stages(8)
    propose(planner=lambda: Published(graph))
    assert found(cost, 8, planner_options={"times": 3}).schedule == "1f1b"
    with pytest.raises(ValueError, match=r"no option speed; it has graph, times"):
        found(cost, 8, planner_options={"speed": 3})
    with pytest.raises(ValueError, match=r"option times of planner test is True; it takes int"):
        found(cost, 8, planner_options={"times": True})


def test_the_limit_on_replicas_twice(propose):
    """As an argument and as an option: neither wins."""
    cost = cost_model((), [1, 1], [1, 1], cluster(4))
    propose(planner=Limited)
    with pytest.raises(ValueError, match=r"given twice, 2 for every planner and 4 as an option"):
        found(cost, 4, max_replicas=2, planner_options={"max_replicas": 4})


def test_what_a_planner_can_be_told():
    """Fields and the types that they take; none for a planner without fields."""
    assert options_of("even") == {"max_replicas": "int | None", "fewer_stages": "bool"}
    assert options_of("data-parallel") == {}


def test_bottleneck():
    """3 s per sample on one device, 8 s on four: the first is slower."""
    cost = cost_model(chain(2), [1, 4], [2, 4], cluster(5))
    graph = stage_graph(chain(2), [(0,), (1, 2, 3, 4)], 8, [4, 4])
    assert bottleneck_s_per_sample(graph, cost) == 3
