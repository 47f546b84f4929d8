"""PipeDream's recurrence without memory: the pipeline with the least time of its slowest part.

Level by level from the devices up: within a level all spans (u, v) for one component, then for two,
and so on; at the last level only spans from the empty state. Every number of copies that higher
levels may make of a component has tables of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from anabranch.compiled import compiled
from anabranch.planner.pipedream.terms import Matrix, PlannedSpan, Terms
from anabranch.planner.toolkit.budget import Budget
from anabranch.remembered import remembered


def solve(terms: Terms, budget: Budget) -> tuple[PlannedSpan, ...] | None:
    """Return a plan of the least period; None if there is none even with infinite memory.

    Raises:
        BudgetError: if ``budget`` runs out.
    """
    recurrence, top = _Recurrence(terms, budget), len(terms.tiers) - 1
    table = recurrence.table(top, 1)
    if table.best[-1][0, -1] == np.inf:
        return None
    return recurrence.pieces(table, top, 1, (0, len(terms.states) - 1))


@dataclass(frozen=True)
class _Recurrence:
    terms: Terms
    budget: Budget

    @remembered
    def _component(self, level: int, copies: int) -> Matrix:
        """Return A^level on a whole component with ``copies`` copies; level -1 is a device."""
        if level < 0:
            return self.terms.compute_s(copies)
        return np.asarray(self.table(level, copies).best[-1])

    def table(self, level: int, copies: int) -> LevelTable:
        """Return T and A at a level for 1, 2 .. components."""
        size = self.terms.tiers[level].size
        cut = self.terms.cut_s(level, copies)
        stage = np.stack([self._stage(level, copies, m) for m in range(1, size + 1)])
        # At the last level a pipeline starts with the model.
        starts = 1 if copies * self.terms.component(level) == self.terms.devices else len(cut)
        best = stage[:, :starts].copy()
        reach = len(cut) - np.argmax(stage[:, :, ::-1] < np.inf, axis=2)
        left = self.budget.limit - self.budget.spent
        self.budget.spend(_join(stage, cut, reach, best, left))
        return LevelTable(cut, stage, best)

    def _stage(self, level: int, copies: int, m: int) -> Matrix:
        if not self.terms.possible(copies * m):
            count = len(self.terms.states)
            return np.full((count, count), np.inf)
        inside = self._component(level - 1, copies * m)
        return np.asarray(np.maximum(inside, self.terms.reduce_s(level, copies, m)))

    def pieces(
        self, table: LevelTable, level: int, copies: int, span: tuple[int, int]
    ) -> tuple[PlannedSpan, ...]:
        """Return the plan behind A of all components.

        A single span is preferred to several of equal time: fewer stages fill faster.
        """
        (cut, stage, best), (start, stop) = table, span
        m, pieces = len(best), []

        def take(first: int, n: int) -> None:
            inside: tuple[PlannedSpan, ...] = ()
            if level:
                below = self.table(level - 1, copies * n)
                inside = self.pieces(below, level - 1, copies * n, (first, stop))
            pieces.append(PlannedSpan(first, stop, n, inside))

        while stage[m - 1, start, stop] > best[m - 1, start, stop]:
            # By components of the last piece.
            longest = np.maximum(best[m - 2 :: -1, start], stage[: m - 1, :, stop])
            is_quick = np.maximum(longest, cut) <= best[m - 1, start, stop]
            n, first = np.argwhere(is_quick)[0].tolist()
            take(first, n + 1)
            stop, m = first, m - n - 1
        take(start, m)
        return tuple(reversed(pieces))


class LevelTable(NamedTuple):
    """T and A at one level, for one number of copies.

    Attributes:
        cut: seconds per state.
        stage: T of 1, 2 .. components.
        best: A likewise, of spans from the first few states.
    """

    cut: NDArray[np.float64]
    stage: NDArray[np.float64]
    best: NDArray[np.float64]


@compiled
def _join(
    stage: NDArray[np.float64],
    cut: NDArray[np.float64],
    reach: NDArray[np.int64],
    best: NDArray[np.float64],
    most: float,
) -> int:
    """Lower A, initially T, to the best of all cuts; return the steps taken, at most ``most``.

    Args:
        reach: [component, state] end of the states that a part starting there can reach.
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
