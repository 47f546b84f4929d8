"""Passes over the stages that a plan may have, from one downset to larger ones.

::

    lo   {}  {}  {}   a   a   b   a,b         a pair per stage; all pairs of one size of lo, here
    hi   a   b   a,b  a,b all a,b all         0, 1 and 2, can be treated at once
         |---------|  |---------|  |-|
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anabranch.cost.nested_weights import Floats, Ints, run_starts

NEVER = 1 << 24
"""More devices or stages than there are."""


@dataclass(frozen=True)
class StageOptions:
    """Stages that a plan may have, ascending by ``lo``.

    Attributes:
        lo, hi: indices of the downsets before and after it.
        devices: how many it takes.
        load_s: seconds per micro-batch.
        held: micro-batches that it can keep in flight.
        mode: place of its mode: replicas, tensor degree and recomputation.
    """

    lo: Ints
    hi: Ints
    devices: Ints
    load_s: Floats
    held: Ints
    mode: Ints

    def __len__(self) -> int:
        return len(self.lo)

    def take(self, keep: NDArray[Any]) -> StageOptions:
        """Those that a mask or ascending indices name."""
        return StageOptions(*(getattr(self, column.name)[keep] for column in fields(self)))

    def sorted(self) -> StageOptions:
        """The same, ascending by ``lo``."""
        return self.take(np.argsort(self.lo, kind="stable"))

    @staticmethod
    def joined(several: Sequence[StageOptions]) -> StageOptions:
        """All of these, in order; at least one."""
        return StageOptions(
            *(
                np.concatenate([getattr(options, column.name) for options in several])
                for column in fields(StageOptions)
            )
        )


class Walk:
    """Goes through pairs of downsets, ascending by ``lo``, all of one size of ``lo`` at once."""

    def __init__(self, lo: Ints, hi: Ints, starts: NDArray[np.int64], states: int) -> None:
        self.lo, self.hi, self.states = lo, hi, states
        self._first = run_starts(lo)
        self._row = lo[self._first]
        cuts = np.searchsorted(lo, [*starts.tolist(), states])
        rows = np.searchsorted(self._row, [*starts.tolist(), states])
        self._levels = [
            (a, b, i, j)
            for (a, b), (i, j) in zip(pairwise(cuts.tolist()), pairwise(rows.tolist()), strict=True)
            if a < b
        ]

    def backwards(self) -> Iterator[tuple[slice, NDArray[np.int64], Ints]]:
        """Sizes, descending: the pairs, where each ``lo`` starts among them, and these ``lo``."""
        for a, b, i, j in reversed(self._levels):
            yield slice(a, b), self._first[i:j] - a, self._row[i:j]

    def after(self, devices: Ints) -> Ints:
        """Fewest devices from each downset to the end; ``devices`` per pair."""
        result = np.full(self.states, NEVER, dtype=np.int32)
        result[-1] = 0
        for pairs, first, row in self.backwards():
            total = devices[pairs] + result[self.hi[pairs]]
            result[row] = np.minimum(np.minimum.reduceat(total, first), NEVER)
        return result

    def before(self, devices: Ints) -> Ints:
        """Fewest devices from the start to each downset."""
        result = np.full(self.states, NEVER, dtype=np.int32)
        result[0] = 0
        for a, b, _, _ in self._levels:
            total = np.minimum(devices[a:b] + result[self.lo[a:b]], NEVER)
            np.minimum.at(result, self.hi[a:b], total)
        return result

    def room(self, devices: Ints, limit: int) -> Ints | None:
        """Per pair, the most devices of its stage in any plan; None if there is no plan."""
        after = self.after(devices)
        if after[0] > limit:
            return None
        others = self.before(devices)[self.lo] + after[self.hi]
        return np.asarray(limit - others, dtype=np.int32)
