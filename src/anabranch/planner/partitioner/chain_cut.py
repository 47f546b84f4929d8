"""Cuts of a row of stages whose devices are given.

    order     a1 a2 a3 | b1 b2 | b3 join          devices 2, 1, 1: which cuts are best?

First the least longest period, then, within a factor ``slack`` of it, the shortest way through the
pipeline and back. Both are dynamic programmes over the cuts, for stages in nodes of their own and
for stages spread over all nodes (``toolkit.assemble``).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from anabranch.cost import CostModel
from anabranch.cost.communication import all_reduce_s
from anabranch.cost.nested_weights import NestedSets
from anabranch.cost.period import period_s, traffic_s, work_s
from anabranch.planner.partitioner.limits import SEARCH
from anabranch.planner.partitioner.range_prices import Floats, Ints
from anabranch.planner.toolkit.parts import Part
from anabranch.planner.toolkit.prices import MicrobatchPrices, Mode


class ChainCutter:
    """Cuts one model's operators in one topological order."""

    def __init__(self, cost: CostModel, batch_size: int, order: Sequence[int]) -> None:
        self._cost = cost
        self._batch_size = batch_size
        step = -(-len(order) // SEARCH.most_cuts)
        groups = [order[i : i + step] for i in range(0, len(order), step)]
        self._row = NestedSets.row(cost, [sum(1 << op for op in group) for group in groups])
        self._place = {op: i for i, op in enumerate(order)}
        self._tables: dict[tuple[int, Mode, bool], tuple[Floats, Floats, Ints]] = {}
        self._links = (False, True) if len(cost.cluster.levels) > 1 else (False,)

    def row_of(self, parts: Sequence[Part]) -> list[Part] | None:
        """The parts in the order of the row if each is a run of it, else None."""
        spans = []
        for part in parts:
            places = [place for op, place in self._place.items() if part.mask >> op & 1]
            if max(places) - min(places) + 1 != len(places):
                return None
            spans.append((min(places), part))
        return [part for _, part in sorted(spans, key=lambda span: span[0])]

    def cut(self, size: int, modes: Sequence[Mode]) -> list[list[Part]]:
        """Stages with these modes in order: up to one row of them per slack, and one."""
        if not 0 < len(modes) <= len(self._row.parts):
            return []
        found: list[tuple[int, ...]] = []
        for inside in self._links:
            found += [cut for cut in self._cuts(size, modes, inside) if cut not in found]
        return [self._parts(cuts, modes) for cuts in found]

    def _cuts(self, size: int, modes: Sequence[Mode], inside: bool) -> list[tuple[int, ...]]:
        """The best cuts if what crosses them leaves its node, or stays inside."""
        count = len(modes)
        tables = [self._table(size, mode, inside) for mode in modes]
        periods = [
            np.where(headroom >= count - 1 - s, period, np.inf)
            for s, (period, _, headroom) in enumerate(tables)
        ]
        least = periods[0][0]
        for period in periods[1:]:
            least = np.maximum(least[:, None], period).min(axis=0)
        if not np.isfinite(least[-1]):
            return []
        ways = [way for _, way, _ in tables]
        bounds = [least[-1] * slack for slack in SEARCH.slack]
        return [
            self._shortest(periods, ways, bound, early=early)
            for bound in bounds
            for early in (False, True)
        ]

    @staticmethod
    def _shortest(
        periods: Sequence[Floats], ways: Sequence[Floats], bound: float, *, early: bool = False
    ) -> tuple[int, ...]:
        """The cuts with the shortest way within the bound; of equals late or early ones."""
        bound *= 1 + 1e-9
        sums = np.where(periods[0][0] <= bound, ways[0][0], np.inf)
        chosen = []
        for period, way in zip(periods[1:], ways[1:], strict=True):
            totals = sums[:, None] + np.where(period <= bound, way, np.inf)
            sums = totals.min(axis=0)
            # Equal up to rounding.
            least = totals <= sums * (1 + 1e-9)
            last = len(totals) - 1
            chosen.append(last - least[::-1].argmax(axis=0) if early else least.argmax(axis=0))
        cuts = [len(sums) - 1]
        for before in reversed(chosen):
            cuts.append(int(before[cuts[-1]]))
        return (0, *reversed(cuts))

    def _parts(self, cuts: Sequence[int], modes: Sequence[Mode]) -> list[Part]:
        return [
            Part(self._row.mask(i, j), mode.replicas, mode.recompute, mode.tensor)
            for i, j, mode in zip(cuts, cuts[1:], modes, strict=False)
        ]

    def _table(self, size: int, mode: Mode, inside: bool) -> tuple[Floats, Floats, Ints]:
        """Period, seconds of the way through, and largest height of every run: [start, stop]."""
        key = size, mode, inside
        if key not in self._tables:
            self._tables[key] = self._price(self._prices(size), mode, inside)
        return self._tables[key]

    def _prices(self, size: int) -> MicrobatchPrices:
        memory = self._cost.cluster.memory_bytes
        return MicrobatchPrices(self._cost, self._batch_size, size, (), memory)

    def _price(
        self, prices: MicrobatchPrices, mode: Mode, inside: bool
    ) -> tuple[Floats, Floats, Ints]:
        row, n = self._row, prices.samples(mode.replicas)
        weights = row.matrices(mode.tensor)
        running = row.compute_s(n, mode.tensor, recompute=mode.recompute)
        compute = running[None, :] - running[:, None]
        link = self._cost.cluster.levels[0]
        price = 1 / link.bandwidth if inside else self._cost.border_price(mode.devices)
        traffic = traffic_s(weights.border.comes, weights.border.goes, n, price)
        reduce_s = all_reduce_s(weights.trainable, *prices.ring(mode.replicas, mode.tensor))
        period = period_s(work_s(compute, traffic), compute, reduce_s, prices.num_microbatches)
        period[np.tril_indices(len(period))] = np.inf
        headroom = prices.headroom(weights, mode.replicas, recompute=mode.recompute)
        return period, compute + traffic, headroom
