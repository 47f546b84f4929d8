"""The step of a plan whose links cost nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from anabranch.graph.opgraph import OpGraph
from anabranch.plans.edges import EVERY_EDGE, message_edges
from anabranch.plans.plan import Plan
from anabranch.schedule import compute_order
from anabranch.schedule.asynchronous import split_batches
from anabranch.simulator import stream
from anabranch.simulator.costs import StageTimes
from anabranch.simulator.run import step_seconds


def ideal_step_s(
    plan_: Plan,
    forward_s: Sequence[Mapping[int, float]],
    backward_s: Sequence[Mapping[int, float]],
    *,
    model: OpGraph | None = None,
) -> float:
    """Seconds of a step whose links cost nothing: what the schedule allows for these stage times.

    Of an asynchronous plan, seconds per mini-batch once the pipeline is full.

    Args:
        plan_: stages and schedule.
        forward_s: per stage, {samples of one device's slice: seconds of a forward}.
        backward_s: likewise.
        model: tells stage edges that carry data or gradients from those that only order; by default
            all do.
    """
    graph = plan_.stage_graph
    edges = message_edges(graph, model) if model is not None else EVERY_EDGE
    times = StageTimes(forward_s, backward_s, edges)
    if plan_.mode == "async":
        return stream.steady(split_batches(graph), times).period_s
    return step_seconds(graph, compute_order(graph, plan_.schedule), times)
