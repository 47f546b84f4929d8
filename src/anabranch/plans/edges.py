"""Values that cross from one stage to another: facts of a stage graph and its operators."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from anabranch.graph.opgraph import BATCH, OpGraph
from anabranch.plans.stages import StageGraph


def edge_values(graph: StageGraph, model: OpGraph) -> Mapping[tuple[int, int], tuple[int, ...]]:
    """Per pair of stages, the indices of the values that one makes and the other reads."""
    stage_of = {name: s for s, stage in enumerate(graph.stages) for name in stage.operators}
    owner = [stage_of[op.name] for op in model.ops]
    carried: dict[tuple[int, int], list[int]] = defaultdict(list)
    for index, value in enumerate(model.values):
        if value.producer == BATCH:
            continue
        source = owner[value.producer]
        for target in {owner[consumer] for consumer in value.consumers}:
            if target != source:
                carried[source, target].append(index)
    return {edge: tuple(values) for edge, values in sorted(carried.items())}


def data_and_gradient_edges(
    graph: StageGraph, model: OpGraph
) -> tuple[frozenset[tuple[int, int]], frozenset[tuple[int, int]]]:
    """The stage edges that carry messages forward, and those that carry messages back.

    A stage edge without a value is there to order two stages, as a pipeline that knows only chains
    does. It has messages of no bytes in both directions, so its stages wait for one another.
    """
    carried = edge_values(graph, model)
    order = set(graph.edges) - set(carried)
    gradients = {
        edge for edge, values in carried.items() if any(model.values[v].grad for v in values)
    }
    return frozenset(order | set(carried)), frozenset(order | gradients)
