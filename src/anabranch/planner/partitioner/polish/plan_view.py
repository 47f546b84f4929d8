"""A plan that is to be changed, and which of its stages are worth changing.

In a large plan only those are: the longest periods and all-reduces, and those that work least.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from operator import or_

from anabranch.cost import CostModel
from anabranch.graph.digraph import topological_order
from anabranch.planner.partitioner.limits import POLISH
from anabranch.planner.toolkit.assemble import Assembler
from anabranch.planner.toolkit.parts import Part, PartPrices, edges, heights, successors

Parts = tuple[Part, ...]


@dataclass(frozen=True)
class PlanView:
    """A plan at the micro-batch size of its assembler."""

    assembler: Assembler
    parts: Parts

    @property
    def cost(self) -> CostModel:
        """Prices the operators on the cluster."""
        return self.assembler.prices.cost

    @property
    def prices(self) -> PartPrices:
        """Prices the parts."""
        return self.assembler.prices

    @cached_property
    def focus(self) -> list[int]:
        """The stages worth changing: longest periods, longest all-reduces, then least work."""
        parts, prices = self.parts, self.prices
        if len(parts) <= POLISH.focus:
            return list(range(len(parts)))
        period = sorted(range(len(parts)), key=lambda s: -prices.period_s(parts[s]))
        reduce_s = sorted(range(len(parts)), key=lambda s: -prices.reduce_s(parts[s]))
        chosen = [*period[: POLISH.focus // 2], *reduce_s[:1], *reversed(period)]
        return list(dict.fromkeys(chosen))[: POLISH.focus]

    @cached_property
    def pairs(self) -> set[tuple[int, int]]:
        """Pairs of stages between which values flow."""
        return edges(self.prices, self.parts)

    @cached_property
    def borders(self) -> list[tuple[int, int]]:
        """Those with a stage that is worth changing."""
        focus = self.focus
        return sorted((x, y) for x, y in self.pairs if x in focus or y in focus)

    @cached_property
    def is_chain(self) -> bool:
        """Whether every stage waits for the one before it: no two run side by side."""
        after = all((x, x + 1) in self.pairs for x in range(len(self.parts) - 1))
        return self.assembler.chained or after

    @cached_property
    def short_of_memory(self) -> set[Part]:
        """Stages that without recomputation have no memory for a deep warm-up."""
        arranged, pairs = self.assembler.arrange(self.parts)
        return {
            part
            for part, h in zip(arranged, heights(len(arranged), pairs), strict=True)
            if self.prices.headroom(replace(part, recompute=False)) < 2 * h
        }

    def changed(self, changes: dict[int, Part | None]) -> Parts:
        """The parts with some replaced, or left out for None."""
        replaced = (changes.get(s, part) for s, part in enumerate(self.parts))
        return tuple(part for part in replaced if part is not None)

    def valid(self, parts: Parts) -> Iterator[Parts]:
        """The parts if each has operators and none waits for itself."""
        after = successors(len(parts), edges(self.prices, parts))
        if all(part.mask for part in parts) and len(topological_order(after, int)) == len(parts):
            yield parts


def some_of(count: int) -> list[int]:
    """Numbers of replicas that may leave a stage of so many: one, half, all but one."""
    return sorted({1, count // 2, count - 1} - {0, count})


def union(masks: Sequence[int]) -> int:
    """The operators of all."""
    return reduce(or_, masks, 0)
