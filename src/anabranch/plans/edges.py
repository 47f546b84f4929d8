"""Values and messages between the stages of a stage graph."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from anabranch.graph.opgraph import BATCH, OpGraph, bits
from anabranch.plans.stages import StageGraph


def edge_values(graph: StageGraph, model: OpGraph) -> Mapping[tuple[int, int], tuple[int, ...]]:
    """Map pairs of stages to the indices of values made by the first and read by the second."""
    stage_of = {name: s for s, stage in enumerate(graph.stages) for name in stage.operators}
    op_stage = [stage_of[op.name] for op in model.ops]
    carried: dict[tuple[int, int], list[int]] = defaultdict(list)
    for index, value in enumerate(model.values):
        if value.producer == BATCH:
            continue
        source = op_stage[value.producer]
        for target in {op_stage[consumer] for consumer in value.consumers}:
            if target != source:
                carried[source, target].append(index)
    return {edge: tuple(values) for edge, values in sorted(carried.items())}


def value_edges(op_stage: Sequence[int], model: OpGraph) -> set[tuple[int, int]]:
    """Return the pairs of stages in which the second reads a value of the first.

    Args:
        op_stage: stage of each operator.
    """
    return {(op_stage[a], op_stage[b]) for a, b in model.edges if op_stage[a] != op_stage[b]}


def mask_edges(masks: Sequence[int], model: OpGraph) -> set[tuple[int, int]]:
    """Return ``value_edges`` of stages written as bit masks that cover all operators."""
    op_stage = [0] * len(model)
    for s, mask in enumerate(masks):
        for op in bits(mask):
            op_stage[op] = s
    return value_edges(op_stage, model)


class MessageEdges(NamedTuple):
    """Stage edges with messages in the forward, and those with messages in the backward.

    Attributes:
        forward: their target waits for their source; None for all edges.
        back: their source waits for the backward of their target; None for all of ``forward``.
    """

    forward: Collection[tuple[int, int]] | None = None
    back: Collection[tuple[int, int]] | None = None

    def goes_forward(self, edge: tuple[int, int]) -> bool:
        """Return True if the edge has messages in the forward."""
        return self.forward is None or edge in self.forward

    def comes_back(self, edge: tuple[int, int]) -> bool:
        """Return True if the edge has messages in the backward, too."""
        return self.goes_forward(edge) and (self.back is None or edge in self.back)


EVERY_EDGE = MessageEdges()


def message_edges(graph: StageGraph, model: OpGraph) -> MessageEdges:
    """Return the stage edges that carry values of the model, and those that carry gradients.

    An edge without a value orders two stages: messages of no bytes go in both directions.
    """
    carried = edge_values(graph, model)
    order = set(graph.edges) - set(carried)
    gradients = {
        edge for edge, values in carried.items() if any(model.values[v].grad for v in values)
    }
    return MessageEdges(frozenset(order | set(carried)), frozenset(order | gradients))
