"""The critical path of steps that can be checked by eye, and of any."""

from itertools import pairwise

import pytest
from hypothesis import given

from anabranch.cost import CostModel
from anabranch.plans.stages import StageGraph
from anabranch.schedule import SCHEDULES, compute_order
from anabranch.simulator.costs import ModelCosts
from anabranch.simulator.critical_path import Cause, History
from anabranch.simulator.run import simulate
from tests.simulator.helpers import chain, cluster, cost_model, priced_stage_graphs, stage_graph


def history(graph: StageGraph, cost: CostModel, schedule: str = "1f1b") -> History:
    """What led to what in one step."""
    warm = SCHEDULES[schedule]().warm_up(graph)
    return History(simulate(warm, compute_order(warm, schedule), ModelCosts(warm, cost)))


def told(segments) -> list[str]:
    """Segments in the order of time, such as ``0-1 compute 0``."""
    return [
        f"{part.start:g}-{part.end:g} {part.cause} {'>'.join(map(str, part.stages))}"
        for part in reversed(list(segments))
    ]


def test_a_chain_without_messages():
    """From the end, each compute leads to what it waited for.

    device 0   F0 F1  . B0  . B1
    device 1    . F0 B0 F1 B1
    """
    cost = cost_model(chain(2), [1, 1], [1, 1], cluster(2))
    found = history(stage_graph(chain(2), [(0,), (1,)], 2), cost)
    assert told(found.path()) == [
        "0-1 compute 0",
        "1-2 compute 1",
        "2-3 compute 1",
        "3-4 compute 1",
        "4-5 compute 1",
        "5-6 compute 0",
    ]


def test_messages_take_their_time_and_wait_for_their_ports():
    """Two branches send 1 s each into one device at the same time; the second one waits.

    device 0   F .  .  .      F ends at 1
    device 1   F .  .  .
    device 2   . m0 m1 F B    both messages go in through the port of device 2
    """
    edges = ((0, 2), (1, 2))
    cost = cost_model(edges, [1, 1, 1], [0, 0, 1], cluster(3, bandwidth=1.0), value_bytes=1)
    graph = stage_graph(edges, [(0,), (1,), (2,)], 1)
    forward = [line for line in told(history(graph, cost).path()) if float(line[0]) < 4]
    assert forward == [
        "0-1 compute 1",
        "1-2 message_ports 1>2",
        "2-3 message 1>2",
        "3-4 compute 2",
    ]


def test_an_all_reduce_follows_the_last_backward():
    """Two replicas sum 3 bytes at 1 byte/s once their backwards have ended."""
    cost = cost_model((), [1], [2], cluster(2, bandwidth=1.0), parameter_bytes=3)
    found = history(stage_graph((), [(0, 1)], 2, [2]), cost)
    assert told(found.path()) == ["0-1 compute 0", "1-3 compute 0", "3-6 all_reduce 0"]


def test_the_way_back_ends_where_it_is_asked_to():
    """Device 0 waits from 2 to 3 for the backward of device 1, which is all of that time."""
    cost = cost_model(chain(2), [1, 1], [1, 1], cluster(2))
    found = history(stage_graph(chain(2), [(0,), (1,)], 2), cost)
    assert told(found.back_from(0, 2, until=2.0)) == ["2-3 compute 1"]


@given(priced_stage_graphs())
def test_every_second_of_any_step_has_a_cause(drawn):
    """The path is without gaps from 0 to the end, and nothing begins later than its causes allow:
    what is left over is only what a calibrated cluster calls overhead.
    """
    graph, cost, schedule = drawn
    found = history(graph, cost, schedule)
    path = list(reversed(list(found.path())))
    step_s = max((ran.end for units in found.ran for ran in units), default=0.0)
    assert not path or path[0].start == 0.0
    assert all(a.end == b.start for a, b in pairwise(path))
    assert all(part.end > part.start for part in path)
    if path:
        assert path[-1].end >= step_s
    if cost.cluster.calibration is None:
        assert sum(p.end - p.start for p in path if p.cause is Cause.OVERHEAD) == pytest.approx(0)
