"""The shortest way through a plan within a bound and a number of devices.

A step is about ``(M - 1) * period + path``; with few micro-batches the path matters as much as the
period. For any bound on the period, over the layers of ``exact.lattice``::

    layer[h, k, I, J]  =  min over stages that use up to k devices of their longest time
    path[h, k, I]      =  min over J and k1 of  layer[h, k1, I, J] + path[h - 1, k - k1, J]

The sum over layers is what no way through the plan exceeds; a way may skip a layer.

With deep warm-up and few micro-batches a stage waits only for the way to it and back from it::

    step  =  max over stages of  way to the stage and back + M * time of the stage

For a bound on that, a layer may follow a downset if the least way (head) to it and M times the
layer's longest stage are within the bound.

Time per bound: O((pairs + ways) * D^2 * H) for D devices and H heights: for small problems.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from anabranch.planner.partitioner.exact.partition_programme import PartitionProgramme
from anabranch.planner.partitioner.exact.prices import Bools, Floats
from anabranch.planner.partitioner.limits import EXACT
from anabranch.planner.toolkit.parts import Part
from anabranch.planner.toolkit.prices import Bound


class ShortestPath:
    """The plan within a bound that has the shortest way through it, if there is one.

    Attributes:
        found: whether there is a plan.
        period_s: its longest period; known once its parts have been asked for.
    """

    def __init__(self, reach: PartitionProgramme, bound: Bound, devices: int) -> None:
        self._reach = reach
        self._lattice = reach.weights.lattice
        self._within = reach.priced.within(bound)
        self._devices = devices
        fits = np.where(self._within, reach.priced.headroom, -1)
        graded = ((fits >= 0) & (fits < reach.heights - 1)).any()
        rows = range(reach.heights) if graded else [reach.heights - 1]
        self._stage = [self._stages(fits >= h) for h in rows]
        self._layer = [self._layers(stage) for stage in self._stage]
        self._path = self._paths()
        self.period_s = 0.0
        self._periods = reach.priced.spread_s if bound.spread else reach.priced.slowest_s
        self.found = bool(np.isfinite(self._path[-1][-1, 0]))

    def _stages(self, allowed: Bools) -> Floats:
        """Least time of a stage with up to k devices: [k, pair]."""
        priced = self._reach.priced
        result = np.full((self._devices + 1, allowed.shape[1]), np.inf)
        for k, mode in enumerate(priced.modes):
            times = np.where(allowed[k], priced.path_share[k], np.inf)
            np.minimum(result[mode.devices :], times, out=result[mode.devices :])
        return result

    def _layers(self, stage: Floats) -> Floats:
        layer = stage.copy()
        for split in self._lattice.splits:
            best = np.full((len(layer), len(split.layers)), np.inf)
            for k in range(2, len(layer)):
                for first in range(1, k):
                    both = np.maximum(stage[first, split.first], layer[k - first, split.rest])
                    np.minimum(best[k], np.minimum.reduceat(both, split.starts), out=best[k])
            layer[:, split.layers] = np.minimum(layer[:, split.layers], best)
        return layer

    def _paths(self) -> list[Floats]:
        """Per number of layers the shortest path from a downset on: [k, downset]."""
        lattice = self._lattice
        path = np.full((self._devices + 1, len(lattice.downsets)), np.inf)
        path[:, -1] = 0.0
        result = [path]
        for h in range(self._reach.heights):
            layer, before = self._layer[min(h, len(self._layer) - 1)], result[-1]
            path = before.copy()
            for k in range(1, self._devices + 1):
                ways = layer[k] + before[: self._devices + 1 - k, lattice.above]
                best = np.minimum.reduceat(ways, lattice.starts, axis=1)
                np.minimum(path[k:, :-1], best, out=path[k:, :-1])
            result.append(path)
        return result

    def parts(self) -> Iterator[Part]:
        """The stages, from the first to the last."""
        lattice = self._lattice
        place, k, h = 0, self._devices, self._reach.heights
        while place != len(lattice.downsets) - 1:
            if self._path[h - 1][k, place] == self._path[h][k, place]:
                h -= 1
                continue
            first = int(lattice.starts[place])
            stop = int(np.searchsorted(lattice.below, place, side="right"))
            layer = self._layer[min(h - 1, len(self._layer) - 1)][1 : k + 1, first:stop]
            rest = self._path[h - 1][k - 1 :: -1][:k, lattice.above[first:stop]]
            row, way = divmod(int((layer + rest).argmin()), layer.shape[1])
            pair, used = first + way, row + 1
            yield from self._cut(pair, used, h - 1)
            place, k, h = int(lattice.above[pair]), k - used, h - 1

    def balanced(self, microbatches: int) -> list[Part]:
        """The plan of least step for deep warm-up, last stage first; None if it does not fit."""
        low, high = 0.0, float(microbatches + self._reach.heights)
        head = self._heads(microbatches, high)
        if not np.isfinite(head[-1, -1]):
            return []
        for _ in range(EXACT.bisections):
            middle = (low + high) / 2
            tried = self._heads(microbatches, middle)
            if np.isfinite(tried[-1, -1]):
                high, head = middle, tried
            else:
                low = middle
        return list(self._from_sink(microbatches, high, head))

    def _heads(self, microbatches: int, step: float) -> Floats:
        """Least way to every downset with up to k devices, the step within the bound: [k, I]."""
        lattice, layer = self._lattice, self._layer[-1]
        order = np.argsort(lattice.above, kind="stable")
        starts = np.searchsorted(lattice.above[order], np.arange(1, len(lattice.downsets)))
        head = np.full((self._devices + 1, len(lattice.downsets)), np.inf)
        head[:, 0] = 0.0
        while True:
            before = head.copy()
            for k in range(1, self._devices + 1):
                ways = self._onward(before[: self._devices + 1 - k], layer[k], microbatches, step)
                best = np.minimum.reduceat(ways[:, order], starts, axis=1)
                np.minimum(head[k:, 1:], best, out=head[k:, 1:])
            if (head == before).all():
                return head

    def _onward(self, head: Floats, layer: Floats, microbatches: int, step: float) -> Floats:
        """The way to a layer and through it, infinite where it is not allowed: [k, pair]."""
        there = head[:, self._lattice.below]
        return np.where(there + microbatches * layer <= step, there + layer, np.inf)

    def _from_sink(self, microbatches: int, step: float, head: Floats) -> Iterator[Part]:
        layer = self._layer[-1]
        place, k = len(self._lattice.downsets) - 1, self._devices
        while place:
            pairs = np.flatnonzero(self._lattice.above == place)
            ways = [
                self._onward(head[k - used : k - used + 1], layer[used], microbatches, step)[0]
                for used in range(1, k + 1)
            ]
            row, way = divmod(int(np.array(ways)[:, pairs].argmin()), len(pairs))
            yield from self._cut(int(pairs[way]), row + 1, self._reach.heights - 1)
            place, k = int(self._lattice.below[pairs[way]]), k - row - 1

    def _cut(self, pair: int, k: int, h: int) -> Iterator[Part]:
        """The stages of a layer on up to k devices."""
        row = min(h, len(self._layer) - 1)
        stage, layer = self._stage[row], self._layer[row]
        while stage[k, pair] != layer[k, pair]:
            firsts, rests = self._lattice.ways(pair)
            both = np.maximum(stage[1:k, firsts], layer[k - 1 : 0 : -1, rests])
            used, way = divmod(int(both.argmin()), both.shape[1])
            yield self._part(int(firsts[way]), used + 1, h)
            pair, k = int(rests[way]), k - used - 1
        yield self._part(pair, k, h)

    def _part(self, pair: int, k: int, h: int) -> Part:
        priced = self._reach.priced
        row = h if len(self._layer) > 1 else self._reach.heights - 1
        # Of equally quick modes the first, which has the fewest devices.
        _, best = min(
            (priced.path_share[at, pair], at)
            for at, mode in enumerate(priced.modes)
            if mode.devices <= k and self._within[at, pair] and priced.headroom[at, pair] >= row
        )
        self.period_s = max(self.period_s, float(self._periods[best, pair]))
        return self._reach.part(pair, priced.modes[best])
