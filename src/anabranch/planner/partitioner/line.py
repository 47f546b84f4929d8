"""Fewest devices for a chain of operators: the dynamic programme of a sequential pipeline.

``partitioner.reach`` without blocks, from the sink backwards: the state is (cut i, height h of the
stage that begins there), the value the fewest devices for everything from there on::

    devices[h, i]  =  min over j > i of  need[h, j, i] + devices[h - 1, j]

One pass gives the answer for every depth at once.

Time per bound: O(n^2 H) for n operators and H heights, in H NumPy steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from anabranch.planner.partitioner.chains import Chain
from anabranch.planner.partitioner.parts import Part
from anabranch.planner.partitioner.prices import Bound, Prices
from anabranch.planner.partitioner.ranges import INFINITE, Ints, Ranges


class LineReach:
    """Solves a chain at one micro-batch size for any bound.

    Args:
        chain: operators only.
        prices: periods and memory.
        heights: number of heights; no plan has more stages.
    """

    def __init__(self, chain: Chain, prices: Prices, *, heights: int) -> None:
        self.chain = chain
        self.heights = heights
        self._prices = prices

    @cached_property
    def _ranges(self) -> Ranges:
        return Ranges(self.chain.row, self._prices)

    def solve(self, bound: Bound, caps: Sequence[int]) -> LineFound:
        """Fewest devices within a bound, for several caps on the height, ascending."""
        need = self._ranges.need(bound, self.heights)
        devices = np.full((max(caps) + 1, self.chain.row.size + 1), INFINITE, dtype=np.int32)
        after = np.full(self.chain.row.size + 1, INFINITE, dtype=np.int32)
        after[-1] = 0
        for h in range(len(devices)):
            stage = need[min(h, len(need) - 1)]
            np.minimum((stage + after[:, None]).min(axis=0), INFINITE, out=devices[h])
            after = devices[h]
        return LineFound(self.chain, need, devices, caps)


class LineFound:
    """The answer for one bound.

    Attributes:
        devices: fewest devices per cap.
    """

    def __init__(self, chain: Chain, need: Ints, devices: Ints, caps: Sequence[int]) -> None:
        self._chain = chain
        self._need = need
        self._table = devices
        self._caps = caps
        self.devices = np.minimum.accumulate(devices[:, 0])[list(caps)]

    def parts(self, u: int) -> list[Part]:
        """The stages for one cap, from the first to the last; of equals the shallowest."""
        h = int(self._table[: self._caps[u] + 1, 0].argmin())
        parts = []
        i, size = 0, self._chain.row.size
        while i < size:
            stage = self._need[min(h, len(self._need) - 1), :, i]
            after = self._table[h - 1] if h else np.where(np.arange(size + 1) == size, 0, INFINITE)
            j = int((stage + after).argmin())
            parts.append(Part(self._chain.row.mask(i, j), int(stage[j])))
            i, h = j, h - 1
        return parts
