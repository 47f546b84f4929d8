"""The critical path of steps that can be checked by eye, and of any."""

from itertools import pairwise

import pytest
from hypothesis import given

from anabranch.cost import CostModel
from anabranch.plans.stages import StageGraph
from anabranch.schedule import SCHEDULES, compute_order
from anabranch.simulator.costs import ModelCosts
from anabranch.simulator.critical_path import critical_path
from anabranch.simulator.run import run
from anabranch.timeline import Cause, PathSegment, Timeline
from tests.simulator.helpers import chain, cluster, cost_model, priced_stage_graphs, stage_graph


def path_of(
    graph: StageGraph, cost: CostModel, schedule: str = "1f1b"
) -> tuple[list[PathSegment], Timeline]:
    """The critical path in the order of time, and the step."""
    warm = SCHEDULES[schedule]().warm_up(graph)
    costs = ModelCosts(warm, cost)
    timeline = run(warm, compute_order(warm, schedule), costs, messages=False)
    return critical_path(timeline, warm, costs.message_edges)[::-1], timeline


def lines(graph: StageGraph, cost: CostModel) -> list[str]:
    """The path as lines, such as ``0-1 compute 0``."""
    return [
        f"{part.start:g}-{part.end:g} {part.cause} {'>'.join(map(str, part.stages))}"
        for part in path_of(graph, cost)[0]
    ]


def test_a_chain_without_messages():
    """From the end, each compute leads to what it waited for.

    device 0   F0 F1  . B0  . B1
    device 1    . F0 B0 F1 B1
    """
    cost = cost_model(chain(2), [1, 1], [1, 1], cluster(2))
    assert lines(stage_graph(chain(2), [(0,), (1,)], 2), cost) == [
        "0-1 compute 0",
        "1-2 compute 1",
        "2-3 compute 1",
        "3-4 compute 1",
        "4-5 compute 1",
        "5-6 compute 0",
    ]


def test_a_message_lasts_from_compute_to_compute():
    """Two branches send 1 s each into one device at the same time; the second one waits.

    device 0   F .  .  .      F ends at 1
    device 1   F .  .  .
    device 2   . m0 m1 F B    both messages go in through the port of device 2
    """
    edges = ((0, 2), (1, 2))
    cost = cost_model(edges, [1, 1, 1], [0, 0, 1], cluster(3, bandwidth=1.0), value_bytes=1)
    graph = stage_graph(edges, [(0,), (1,), (2,)], 1)
    forward = [line for line in lines(graph, cost) if float(line[0]) < 4]
    assert forward[1] in ("1-3 message 0>2", "1-3 message 1>2")
    assert forward[2] == "3-4 compute 2"


def test_an_all_reduce_follows_the_last_backward():
    """Two replicas sum 3 bytes at 1 byte/s once their backwards have ended."""
    cost = cost_model((), [1], [2], cluster(2, bandwidth=1.0), parameter_bytes=3)
    graph = stage_graph((), [(0, 1)], 2, [2])
    assert lines(graph, cost) == ["0-1 compute 0", "1-3 compute 0", "3-6 all_reduce 0"]


@given(priced_stage_graphs())
def test_every_second_of_any_step_has_a_cause(drawn):
    """The path is without gaps from 0 to the end; what is left over is only what a calibrated
    cluster calls overhead, or surrounds computes that take no time.
    """
    graph, cost, schedule = drawn
    path, timeline = path_of(graph, cost, schedule)
    assert sum(part.end - part.start for part in path) == pytest.approx(timeline.step_s)
    assert all(a.end == b.start for a, b in pairwise(path))
    assert all(part.end > part.start for part in path)
    if path:
        assert path[-1].end == timeline.step_s
    times = cost.op_seconds(1)
    if cost.cluster.calibration is None and all(seconds.all() for seconds in times):
        assert sum(p.end - p.start for p in path if p.cause is Cause.OVERHEAD) == pytest.approx(0)
