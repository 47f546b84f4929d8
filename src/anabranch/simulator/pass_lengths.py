"""Lengths of passes and messages of stages, by which lists are scheduled."""

from __future__ import annotations

from dataclasses import replace

from anabranch.plans.stages import Stage, StageGraph
from anabranch.simulator.costs import ModelCosts


def with_lengths(costs: ModelCosts) -> StageGraph:
    """Return the stages with their lengths, those of the slowest stage as units."""
    graph, stages = costs.graph, list[Stage]()
    slices = [max(graph.slice_sizes(s)) for s in range(len(graph))]
    seconds = [costs.compute_s(s, samples) for s, samples in enumerate(slices)]
    sizes = [stage.microbatch_size for stage in graph.stages]
    slowest_s = max(sum(pair) / size for pair, size in zip(seconds, sizes, strict=True)) or 1.0
    for s, stage in enumerate(graph.stages):
        forward_s, backward_s = seconds[s]
        message_s = max((_message_s(costs, s, t) for t in graph.successors[s]), default=0.0)
        factor = backward_s / forward_s if forward_s else 2.0
        changed = replace(
            stage,
            load=round((forward_s + backward_s) / sizes[s] / slowest_s, 3),
            backward_factor=round(factor, 3),
            weight_share=round(costs.weight_share(s, slices[s]), 3),
            message=round(message_s / sizes[s] / slowest_s, 3),
        )
        stages.append(changed)
    return replace(graph, stages=tuple(stages))


def _message_s(costs: ModelCosts, s: int, t: int) -> float:
    """Return the seconds of the first message of a stage edge, if nothing else is on its way."""
    graph = costs.graph
    if not costs.message_edges.goes_forward((s, t)):
        return 0.0
    samples = min(max(graph.slice_sizes(x)) for x in (s, t))
    route = costs.route(graph.stages[s].devices[0], graph.stages[t].devices[0])
    nbytes = costs.message_bytes(s, t, samples)[0]
    return route.latency_s + nbytes * route.per_byte_s + 2 * costs.message_s(nbytes)
