"""Values that cross from one stage to another: facts of a stage graph and its operators."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import NamedTuple

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


class MessageEdges(NamedTuple):
    """Stage edges along which messages go, and those along which messages come back.

    Attributes:
        forward: their target waits for their source; None for all edges.
        back: their source waits for the backward of their target; None for all of ``forward``.
    """

    forward: Collection[tuple[int, int]] | None = None
    back: Collection[tuple[int, int]] | None = None

    def goes_forward(self, edge: tuple[int, int]) -> bool:
        """Whether the edge has messages at all."""
        return self.forward is None or edge in self.forward

    def comes_back(self, edge: tuple[int, int]) -> bool:
        """Whether it has messages in both directions."""
        return self.goes_forward(edge) and (self.back is None or edge in self.back)


EVERY_EDGE = MessageEdges()


def message_edges(graph: StageGraph, model: OpGraph) -> MessageEdges:
    """The stage edges that carry values of the model, and gradients.

    An edge without a value orders two stages: messages of no bytes go in both directions.
    """
    carried = edge_values(graph, model)
    order = set(graph.edges) - set(carried)
    gradients = {
        edge for edge, values in carried.items() if any(model.values[v].grad for v in values)
    }
    return MessageEdges(frozenset(order | set(carried)), frozenset(order | gradients))
