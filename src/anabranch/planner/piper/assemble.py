"""Stage graphs on all devices, of the parts of a line.

After ``toolkit.assemble``, a stage that now has room keeps its insides after all, and the devices
of a replica under tensor parallelism are put inside one node::

    node 0 [ a b b . ]  node 1 [ . c c . ]        b: two devices of one replica
    node 0 [ b b c c ]  node 1 [ a . . . ]        largest groups first, where the above splits one
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from anabranch.graph.opgraph import bits
from anabranch.planner.toolkit.assemble import Assembler
from anabranch.planner.toolkit.parts import Part, PartPrices
from anabranch.planner.toolkit.prices import MicrobatchPrices
from anabranch.plans.stages import Stage, StageGraph


def assemble(
    prices: MicrobatchPrices, parts: Sequence[Part], max_replicas: int | None = None
) -> StageGraph | None:
    """A stage graph of the parts of a line, first stage first.

    None if the parts have no use for all devices, or some then do not fit.
    """
    order = tuple(op for part in parts for op in bits(part.mask))
    known = PartPrices(prices)
    limit = max_replicas or prices.cost.cluster.num_devices
    candidate = Assembler(known, order, limit, chained=True).assemble(parts)
    if candidate is None:
        return None
    graph = candidate.graph
    stages = [_without_need(known, stage, graph.height[s]) for s, stage in enumerate(graph.stages)]
    placed = inside_nodes(stages, prices.cost.cluster.group_sizes[0])
    return None if placed is None else replace(graph, stages=placed)


def _without_need(prices: PartPrices, stage: Stage, height: int) -> Stage:
    """The stage without recomputation if that fits: it may have more replicas than planned."""
    part = Part(prices.cost.graph.mask(stage.operators), stage.replicas, tensor=stage.tensor)
    spare = stage.recompute and prices.headroom(part) >= height
    return replace(stage, recompute=False) if spare else stage


def inside_nodes(stages: Sequence[Stage], node: int) -> tuple[Stage, ...] | None:
    """The stages with each replica's devices in one node of this size; None if it cannot be."""
    if all(_inside(stage, node) for stage in stages):
        return tuple(stages)
    # Every block then starts at a multiple of its own groups, where degrees divide each other.
    start, placed = 0, list(stages)
    for s in sorted(range(len(stages)), key=lambda s: (-stages[s].tensor, s)):
        stop = start + len(stages[s].devices)
        placed[s] = replace(stages[s], devices=tuple(range(start, stop)))
        start = stop
    return tuple(placed) if all(_inside(stage, node) for stage in placed) else None


def _inside(stage: Stage, node: int) -> bool:
    firsts = range(0, len(stage.devices), stage.tensor)
    groups = [stage.devices[i : i + stage.tensor] for i in firsts]
    return all(len({device // node for device in group}) == 1 for group in groups)
