"""Fewest devices within a bound, over all partitions of a graph: a dynamic programme on downsets.

``exact.lattice`` says how a partition is a chain of layers. From the sink backwards::

    layer[h, I, J]   =  min( need[h, I, J],  min over K of  need[h, I, K] + layer[h, K, J] )
    devices[h, I]    =  min( devices[h - 1, I],  min over J of  layer[h, I, J] + devices[h - 1, J] )

with need the fewest devices of one stage at height h within the bound, and devices those of all
beyond the downset I if nothing of it is higher than h. A layer's place in the chain is the height
of its stages in one of the chains that stand for a partition, so this is exact in memory as well.

Of equals the plan with the least sum of path shares is kept: the stages' own seconds and those of
what they read, as the fraction of a number of devices.

Time per bound: O((pairs + ways) * H) for H heights, in NumPy steps.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from anabranch.planner.partitioner.exact.lattice import Lattice
from anabranch.planner.partitioner.exact.prices import (
    NEVER,
    Bools,
    Floats,
    Ints,
    LatticeWeights,
    PricedStages,
)
from anabranch.planner.toolkit.parts import Part
from anabranch.planner.toolkit.prices import Bound, Mode


class PartitionProgramme:
    """Solves one lattice at one micro-batch size for any bound.

    Args:
        heights: number of heights; no plan has more stages in a row.
    """

    def __init__(self, weights: LatticeWeights, priced: PricedStages, *, heights: int) -> None:
        self.weights = weights
        self.priced = priced
        self.heights = heights

    def part(self, pair: int, mode: Mode) -> Part:
        """A stage of the model."""
        return Part(self.weights.mask(pair), mode.replicas, mode.recompute, mode.tensor)

    def solve(self, bound: Bound) -> PartitionSolution:
        """Fewest devices within a bound, for every cap on the height."""
        lattice = self.weights.lattice
        within = self.priced.within(bound)
        need = self.priced.need(within, self.heights)
        layer = need.copy()
        for split in lattice.splits:
            ways = need[:, split.first] + layer[:, split.rest]
            best = np.minimum.reduceat(ways, split.starts, axis=1)
            layer[:, split.layers] = np.minimum(layer[:, split.layers], best)
        np.minimum(layer, NEVER, out=layer)
        devices = np.full((self.heights + 1, len(lattice.downsets)), NEVER)
        devices[0, -1] = 0
        for h in range(self.heights):
            ways = layer[min(h, len(layer) - 1)] + devices[h, lattice.above]
            best = np.minimum.reduceat(ways, lattice.starts)
            devices[h + 1] = devices[h]
            np.minimum(devices[h, :-1], best, out=devices[h + 1, :-1])
            if len(layer) == 1 and (devices[h + 1] == devices[h]).all():
                devices[h + 1 :] = devices[h]
                break
        return PartitionSolution(self, within, need, layer, devices)


class PartitionSolution:
    """The answer for one bound.

    Attributes:
        devices: fewest devices per cap on the height.
    """

    def __init__(
        self, reach: PartitionProgramme, within: Bools, need: Floats, layer: Floats, devices: Floats
    ) -> None:
        self._reach = reach
        self._lattice: Lattice = reach.weights.lattice
        self._within = within
        self._need = need
        self._layer = layer
        self._table = devices
        self.devices: Ints = devices[1:, 0].astype(np.int32)

    def parts(self, cap: int) -> list[Part]:
        """The stages for one cap, from the first to the last."""
        return list(self._walk(cap))

    def _walk(self, h: int) -> Iterator[Part]:
        lattice = self._lattice
        place, last = 0, len(lattice.downsets) - 1
        while place != last:
            if h and self._table[h, place] == self._table[h + 1, place]:
                h -= 1
                continue
            first = int(lattice.starts[place])
            stop = int(np.searchsorted(lattice.below, place, side="right"))
            row = self._layer[min(h, len(self._layer) - 1), first:stop]
            ways = row + self._table[h, lattice.above[first:stop]]
            pair = first + int(ways.argmin())
            yield from self._stages(pair, h)
            place, h = int(lattice.above[pair]), h - 1

    def _stages(self, pair: int, h: int) -> Iterator[Part]:
        """The stages of a layer."""
        row = min(h, len(self._layer) - 1)
        need, layer = self._need[row], self._layer[row]
        while need[pair] != layer[pair]:
            firsts, rests = self._lattice.ways(pair)
            best = int((need[firsts] + layer[rests]).argmin())
            yield self._part(int(firsts[best]), h)
            pair = int(rests[best])
        yield self._part(pair, h)

    def _part(self, pair: int, h: int) -> Part:
        row = min(h, len(self._need) - 1)
        devices = int(self._need[row, pair])
        mode = self._reach.priced.mode(self._within, pair, h, devices)
        return self._reach.part(pair, mode)
