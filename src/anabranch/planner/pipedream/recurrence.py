"""PipeDream's recurrence without memory: the pipeline whose slowest part is quickest.

Level by level from the devices up: within a level all spans (u, v) for one component, then for two,
and so on; at the last level only spans from the empty state. Every number of copies that higher
levels may make of a component has tables of its own.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from anabranch.jit import entry
from anabranch.planner.pipedream.terms import INFINITE, Matrix, Piece, Terms
from anabranch.planner.toolkit.budget import Budget
from anabranch.remembered import remembered


def solve(terms: Terms, budget: Budget) -> tuple[Piece, ...] | None:
    """A plan of the least period; None if there is none whatever the memory.

    Raises:
        BudgetError: if ``budget`` runs out.
    """
    return _Recurrence(terms, budget).solve()


class _Recurrence:
    def __init__(self, terms: Terms, budget: Budget) -> None:
        self._terms = terms
        self._budget = budget

    def solve(self) -> tuple[Piece, ...] | None:
        """A plan of the least period, if there is one."""
        top = len(self._terms.tiers) - 1
        table = self._table(top, 1)
        if table.best[-1][0, -1] == INFINITE:
            return None
        return self._pieces(table, top, 1, (0, len(self._terms.states) - 1))

    @remembered
    def _component(self, level: int, copies: int) -> Matrix:
        """A^level on a whole component, of which there are so many copies; level -1: a device."""
        if level < 0:
            return self._terms.compute_s(copies)
        whole: Matrix = self._table(level, copies).best[-1]
        return whole

    def _table(self, level: int, copies: int) -> LevelTable:
        """T and A at a level for 1, 2 .. components."""
        size = self._terms.tiers[level].size
        cut = self._terms.cut_s(level, copies)
        stage = np.stack([self._stage(level, copies, m) for m in range(1, size + 1)])
        # At the last level a pipeline starts with the model.
        starts = 1 if copies * self._terms.component(level) == self._terms.devices else len(cut)
        best = stage[:, :starts].copy()
        reach = len(cut) - np.argmax(stage[:, :, ::-1] < INFINITE, axis=2)
        left = self._budget.limit - self._budget.spent
        self._budget.spend(_join(stage, cut, reach, best, left))
        return LevelTable(cut, stage, best)

    def _stage(self, level: int, copies: int, m: int) -> Matrix:
        if not self._terms.possible(copies * m):
            count = len(self._terms.states)
            return np.full((count, count), INFINITE)
        inside = self._component(level - 1, copies * m)
        return np.asarray(np.maximum(inside, self._terms.reduce_s(level, copies, m)))

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
