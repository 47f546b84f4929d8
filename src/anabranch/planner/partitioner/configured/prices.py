"""What sets of operators cost as stages, at every micro-batch size and in every mode.

Contiguous ranges of a row are priced all at once, any other sets one by one. What has been priced
is remembered, because a search asks again for every largest micro-batch size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from anabranch.planner.partitioner.rows import Row
from anabranch.planner.toolkit.parts import Facts, Part, PartPrices
from anabranch.planner.toolkit.prices import UNBOUNDED, Mode, Prices

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

NEVER = 1 << 40
"""More samples than there are: there is no such plan."""

Column = tuple[Floats, Ints]
"""Of some sets: seconds per sample, and the most samples that the stage may hold."""


@dataclass(frozen=True)
class Priced:
    """Sets of operators; arrays are [size, mode, set].

    Attributes:
        masks: operators of a set.
        seconds: per sample, its share of the all-reduce included; infinite where impossible.
        most: samples that the stage may hold; 0 where it does not fit.
    """

    masks: Callable[[int], int]
    seconds: Floats
    most: Ints

    @staticmethod
    def of(masks: Callable[[int], int], columns: Sequence[Sequence[Column]]) -> Priced:
        """Put columns together."""
        seconds, most = (
            np.array([[column[i] for column in each] for each in columns]) for i in (0, 1)
        )
        return Priced(masks, seconds, most)


class Book:
    """Prices stages and remembers them.

    Args:
        prices: of a micro-batch size.
        facts: what sets of operators weigh.
    """

    def __init__(self, prices: Callable[[int], Prices], facts: Facts) -> None:
        self._prices = prices
        self._facts = facts
        self._parts: dict[int, PartPrices] = {}
        self._rows: dict[tuple[int, int, Mode], tuple[Row, Column]] = {}
        self._sets: dict[tuple[tuple[int, ...], int, Mode], Column] = {}

    def parts(self, size: int) -> PartPrices:
        """Prices at one micro-batch size."""
        if size not in self._parts:
            self._parts[size] = PartPrices(self._prices(size), self._facts)
        return self._parts[size]

    def row(self, row: Row, size: int, mode: Mode) -> Column:
        """All ranges [i, j) of a row, flattened."""
        key = id(row), size, mode
        if key not in self._rows:
            n = row.size + 1
            seconds, most = np.full((n, n), np.inf), np.zeros((n, n), dtype=np.int64)
            prices = self.parts(size).prices
            if mode in prices.modes:
                some = np.triu_indices(n, 1)
                time, held = _row_prices(prices, row, mode)
                seconds[some], most[some] = time[some], held[some]
            self._rows[key] = row, (seconds.ravel(), most.ravel())
        return self._rows[key][1]

    def sets(self, masks: tuple[int, ...], size: int, mode: Mode) -> Column:
        """Any sets of operators."""
        key = masks, size, mode
        if key not in self._sets:
            parts = self.parts(size)
            seconds, most = np.full(len(masks), np.inf), np.zeros(len(masks), dtype=np.int64)
            if mode in parts.prices.modes:
                for i, mask in enumerate(masks):
                    part = Part(mask, mode.replicas, mode.recompute, mode.tensor)
                    seconds[i] = parts.period_s(part) / size
                    height = np.array(parts.headroom(part), dtype=np.int64)
                    most[i] = _samples(parts.prices, height)
            self._sets[key] = seconds, most
        return self._sets[key]


def _samples(prices: Prices, headroom: Ints) -> Ints:
    """Samples in flight up to a height; as good as any number where all of the batch fits."""
    most = (headroom.astype(np.int64) + 1) * prices.microbatch_size
    return np.where(headroom >= UNBOUNDED, NEVER, most)


def _row_prices(prices: Prices, row: Row, mode: Mode) -> tuple[Floats, Ints]:
    """Seconds per sample and the most samples to hold, of all ranges."""
    n = prices.samples(mode.replicas)
    comes = row.comes.at(n)
    period = prices.period_s(
        _between(row.compute_s(n, mode.tensor, recompute=mode.recompute)),
        comes,
        row.goes.at(n),
        row.reduced(mode.tensor),
        mode.replicas,
        mode.tensor,
    )
    kept = _between(row.kept_bytes(mode.tensor)) * n
    fixed = row.state_bytes(mode.tensor) + prices.cost.receive_slots * comes
    held = row.entering.at(n)
    fixed, held = (fixed + kept, held) if mode.recompute else (fixed, held + kept)
    return period / prices.microbatch_size, _samples(prices, prices.headroom(fixed, held))


def _between(running: Floats) -> Floats:
    """Sums over all ranges from those over the first parts."""
    return running[None, :] - running[:, None]
