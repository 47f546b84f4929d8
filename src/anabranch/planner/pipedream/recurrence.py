"""PipeDream's recurrence without memory: the pipeline whose slowest part is quickest.

Level by level from the devices up: within a level all spans (u, v) for one component, then for two,
and so on; at the last level only spans from the empty state. Every number of copies that higher
levels may make of a component has tables of its own.

What exceeds a bound is dropped at once. If nothing is found the bound rises; as no part of a plan
exceeds the whole, the result is exact.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from anabranch.jit import entry
from anabranch.planner.pipedream.terms import INFINITE, Matrix, Piece, Terms
from anabranch.planner.toolkit.budget import Budget

FIRST = 1.15
"""The first bound, in multiples of what no plan can beat."""

RISE = 1.5
RISES = 8
"""Ratio of the bounds that follow, and how many there are before the search has none."""

_ROUNDING = 1 + 1e-9


def solve(terms: Terms, budget: Budget) -> tuple[Piece, ...] | None:
    """A plan of the least period; None if there is none whatever the memory.

    Raises:
        BudgetError: if ``budget`` runs out.
    """
    for bound in bounds(terms.ideal_s() * FIRST):
        found = BoundedRecurrence(terms, bound, budget).solve()
        if found:
            return found
    return None


def bounds(first: float) -> Iterator[float]:
    """Bounds to try one after the other; the last is none."""
    if first > 0:
        yield from (first * RISE**i for i in range(RISES))
    yield INFINITE


class BoundedRecurrence:
    """The recurrence without anything that exceeds a bound."""

    def __init__(self, terms: Terms, bound: float, budget: Budget) -> None:
        self._terms = terms
        self._bound = bound
        self._budget = budget
        self._whole: dict[tuple[int, int], Matrix] = {}

    def solve(self) -> tuple[Piece, ...]:
        """A plan of the least period within the bound; no pieces if there is none."""
        top = len(self._terms.tiers) - 1
        table = self._table(top, 1)
        if table.best[-1][0, -1] == INFINITE:
            return ()
        return self._pieces(table, top, 1, (0, len(self._terms.states) - 1))

    def _component(self, level: int, copies: int) -> Matrix:
        """A^level on a whole component, of which there are so many copies; level -1: a device."""
        if level < 0:
            return self._within(self._terms.compute_s(copies))
        if (level, copies) not in self._whole:
            count = len(self._terms.states)
            whole = np.full((count, count), INFINITE)
            best = self._table(level, copies).best[-1]
            whole[: len(best)] = best
            self._whole[level, copies] = whole
        return self._whole[level, copies]

    def _table(self, level: int, copies: int) -> LevelTable:
        """T and A at a level for 1, 2 .. components."""
        size = self._terms.tiers[level].size
        cut = self._within(self._terms.cut_s(level, copies))
        stage = np.stack([self._stage(level, copies, m) for m in range(1, size + 1)])
        best = stage[:, : self._starts(level, copies)].copy()
        reach = len(cut) - np.argmax(stage[:, :, ::-1] < INFINITE, axis=2)
        left = self._budget.limit - self._budget.spent
        self._budget.spend(_join(stage, cut, reach, best, left))
        return LevelTable(cut, stage, best)

    def _starts(self, level: int, copies: int) -> int:
        """States at which a component's part may begin: other devices have to do what is before."""
        others = self._terms.devices - copies * self._terms.component(level)
        if others == 0:
            return 1
        within = self._terms.work_s() <= self._bound * others * _ROUNDING
        return int(np.flatnonzero(within)[-1]) + 1

    def _stage(self, level: int, copies: int, m: int) -> Matrix:
        if not self._terms.possible(copies * m):
            count = len(self._terms.states)
            return np.full((count, count), INFINITE)
        inside = self._component(level - 1, copies * m)
        return self._within(np.maximum(inside, self._terms.reduce_s(level, copies, m)))

    def _within(self, seconds: Matrix) -> Matrix:
        return np.where(seconds <= self._bound, seconds, INFINITE)

    def _pieces(
        self, table: LevelTable, level: int, copies: int, span: tuple[int, int]
    ) -> tuple[Piece, ...]:
        """The plan behind one entry."""
        pieces = []
        for start, stop, m in table.split(*span):
            inside: tuple[Piece, ...] = ()
            if level:
                below = self._table(level - 1, copies * m)
                inside = self._pieces(below, level - 1, copies * m, (start, stop))
            pieces.append(Piece(start, stop, m, inside))
        return tuple(pieces)


class LevelTable:
    """T and A at one level, for one number of copies.

    Attributes:
        cut: seconds per state.
        stage: T of 1, 2 .. components.
        best: A likewise, of spans from the first few states.
    """

    def __init__(
        self, cut: NDArray[np.float64], stage: NDArray[np.float64], best: NDArray[np.float64]
    ) -> None:
        self.cut = cut
        self.stage = stage
        self.best = best

    def split(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        """Spans and components of the pieces behind A of all components, in order.

        Where a single piece is as quick as several, it is preferred: fewer stages fill faster.
        """
        pieces: list[tuple[int, int, int]] = []
        m = len(self.best)
        while True:
            value = self.best[m - 1][start, stop]
            if self.stage[m - 1][start, stop] <= value:
                return [(start, stop, m), *reversed(pieces)]
            stop, m, piece = self._last(start, stop, m, float(value))
            pieces.append(piece)

    def _last(
        self, start: int, stop: int, m: int, value: float
    ) -> tuple[int, int, tuple[int, int, int]]:
        for n in range(1, m):
            longest = np.maximum(self.best[m - 1 - n][start], self.cut)
            at = np.flatnonzero(np.maximum(longest, self.stage[n - 1][:, stop]) <= value)
            if len(at):
                return int(at[0]), m - n, (int(at[0]), stop, n)
        raise AssertionError("an entry of the table has a split with its value")


@entry
def _join(
    stage: NDArray[np.float64],
    cut: NDArray[np.float64],
    reach: NDArray[np.int64],
    best: NDArray[np.float64],
    most: float,
) -> int:
    """Lower A, which is T yet, to the best of all cuts; steps taken, of which ``most`` are allowed.

    Args:
        reach: [component, state] behind the last state up to which a part from there is possible.
    """
    steps, (components, starts, states) = 0, best.shape
    for m in range(1, components):
        for n in range(m):
            for u in range(starts):
                for s in range(u + 1, states - 1):
                    first = max(best[m - n - 1, u, s], cut[s])
                    if first < np.inf:
                        steps += reach[n, s] - s
                        for v in range(s + 1, reach[n, s]):
                            best[m, u, v] = min(best[m, u, v], max(first, stage[n, s, v]))
                if steps > most:
                    return steps
    return steps
