"""A lower bound of a step, which spares simulations."""

from __future__ import annotations

from anabranch.plans.stages import StageGraph, split_evenly
from anabranch.simulator.costs import ModelCosts


def least_step_s(graph: StageGraph, costs: ModelCosts) -> float:
    """A lower bound of the step under any schedule, in seconds.

    The busiest stage works through its micro-batches. Before its first forward lies at least one
    forward of each stage on the way to it, and after its last backward one backward of each stage
    on the way back and the all-reduce of that stage. Messages are left out.
    """
    count = len(graph)
    busy, first, last = [0.0] * count, [0.0] * count, [0.0] * count
    for s, stage in enumerate(graph.stages):
        final = graph.num_microbatches(s) - 1
        cut = (split_evenly(*graph.interval(s, i), stage.replicas) for i in (0, final))
        slices = {(b - a, d - c) for (a, b), (c, d) in zip(*cut, strict=True)}
        seconds = {n: costs.compute_s(s, n) for pair in slices for n in pair}
        busy[s] = max(final * sum(seconds[n]) + sum(seconds[z]) for n, z in slices)
        # Of several slices, the bound must not assume which one a neighbour waits for.
        first[s] = min(seconds[n][0] for n in seconds if n)
        last[s] = min(seconds[n][1] for n in seconds if n)
    head, tail = [0.0] * count, [0.0] * count
    for work in costs.all_reduces():
        for s in work.stages:
            tail[s] = max(tail[s], work.seconds)
    for x, y in graph.edges:
        if costs.message_edges.goes_forward((x, y)):
            head[y] = max(head[y], head[x] + first[x])
        if costs.message_edges.comes_back((x, y)):
            tail[y] = max(tail[y], tail[x] + last[x])
    return max(head[s] + busy[s] + tail[s] for s in range(count))
