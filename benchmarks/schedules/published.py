"""ZB-H1 and ZB-H2 by hand (Qi et al., 2024, section 2.2), and the table of rows of transformers.

Both are for p equal stages in a row. Stage s begins with p - s forwards (H1) or 2 (p - s) - 1 (H2),
then gradients of inputs and a forward take turns; gradients of weights follow those of the inputs
of a micro-batch s (H1) or 2 s (H2) later, so every stage holds as many micro-batches as the first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from anabranch.cluster import Cluster
from anabranch.cost import CostModel
from anabranch.planner import PLANNERS
from anabranch.plans.in_flight import with_in_flight
from anabranch.plans.stages import StageGraph
from anabranch.schedule import SCHEDULES, compute_order
from anabranch.schedule.schedule import Action, Kind, Order, Schedule
from anabranch.simulator.costs import ModelCosts, with_lengths
from anabranch.simulator.run import run
from benchmarks.planners.common import profile_of

GIB = 1 << 30


def by_hand(graph: StageGraph, memory: int) -> Schedule:
    """Return H1 (``memory=1``) or H2 of a row of stages, each on one device."""
    stages, count = len(graph), graph.num_microbatches(0)
    lists = {}
    for s, stage in enumerate(graph.stages):
        first, late = memory * (stages - s) - (memory - 1), memory * s
        first = min(first, count)
        actions = [Action(s, Kind.FORWARD, i) for i in range(first)]
        for i in range(count):
            actions.append(Action(s, Kind.INPUT_GRADIENT, i))
            if i >= late:
                actions.append(Action(s, Kind.WEIGHT_GRADIENT, i - late))
            if i + first < count:
                actions.append(Action(s, Kind.FORWARD, i + first))
        rest = range(max(count - late, 0), count)
        actions += [Action(s, Kind.WEIGHT_GRADIENT, i) for i in rest]
        lists[stage.devices[0]] = Order(actions)
    return Schedule(lists)


def steps(stages: int, microbatches: int) -> dict[str, tuple[float, float]]:
    """Seconds and bytes of the fullest device, for schedules of ours and those by hand."""
    profile = profile_of("transformer", 4)
    cost = CostModel(profile, Cluster.preset(f"summit:{stages // 4}x4"))
    (graph,) = PLANNERS["even"]()(cost, batch_size=microbatches, microbatch_size=1)
    graph = with_lengths(ModelCosts(graph, cost))
    costs, result = ModelCosts(graph, cost), {}
    for name in ("1f1b", "1f1b-split", "zb-h1", "zb-h2"):
        filled = SCHEDULES[name]().warm_up(graph)
        timeline = run(filled, compute_order(filled, name), replace(costs, graph=filled))
        result[name] = timeline.step_s, float(max(timeline.peak_bytes.values()))
    for memory in (1, 2):
        whole = with_in_flight(graph, [microbatches] * stages)
        timeline = run(whole, by_hand(graph, memory), replace(costs, graph=whole))
        peak = float(max(timeline.peak_bytes.values()))
        result[f"H{memory} by hand"] = timeline.step_s, peak
    return result


def table() -> str:
    """Return rows of 4 and 8 stages with two to four micro-batches for each."""
    return "\n".join(_lines())


def _lines() -> Iterator[str]:
    names: list[str] = []
    for stages in (4, 8):
        for times in (1, 2, 3, 4):
            cells = steps(stages, times * stages)
            if not names:
                names = [*cells]
                yield f"| stages | micro-batches | {' | '.join(names)} |"
                yield f"|---|---|{'---|' * len(names)}"
            texts = [f"{s * 1e3:.1f} ms, {n / GIB:.2f} GiB" for s, n in cells.values()]
            yield f"| {stages} | {times * stages} | {' | '.join(texts)} |"
