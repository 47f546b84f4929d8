"""Stage graphs on all devices, of the parts of a line.

After ``toolkit.assemble``, a stage that now has room keeps its insides after all.
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
    return replace(
        graph,
        stages=tuple(
            _without_need(known, stage, graph.height[s]) for s, stage in enumerate(graph.stages)
        ),
    )


def _without_need(prices: PartPrices, stage: Stage, height: int) -> Stage:
    """The stage without recomputation if that fits: it may have more replicas than planned."""
    part = Part(prices.cost.graph.mask(stage.operators), stage.replicas, tensor=stage.tensor)
    spare = stage.recompute and prices.headroom(part) >= height
    return replace(stage, recompute=False) if spare else stage
