"""PipeDream's recurrence: the pipeline with the least time of its slowest part.

Level by level from the devices up: within a level all spans (u, v) for one component, then for two,
and so on; at the last level only spans from the empty state. Every number of copies that higher
levels may make of a component has tables of its own.

Memory comes in on devices of one level. A stage holds one micro-batch more than there are stages
behind it, which the recurrence, from the first layer on, does not know yet. From the last layer on
it is known. With e stages behind the first one of those that are left::

    A_e(u, m)  =  min over s, m' of  max( T(u->s, m')  where its headroom allows e,
                                          2 a_s / B,
                                          A_(e-1)(s, m-m') )
"""

from __future__ import annotations

from dataclasses import dataclass
from math import comb
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


def solve_in_memory(terms: Terms, budget: Budget) -> tuple[PlannedSpan, ...] | None:
    """Return the plan of least period that fits, then of fewest stages; None if none fits.

    Args:
        terms: of a single level.

    Raises:
        BudgetError: if ``budget`` runs out.
    """
    last, total = len(terms.states) - 1, terms.devices
    cut = terms.cut_s(0, 1)[:, None]
    after = np.full((last + 1, total + 1), np.inf)
    after[last, 0] = 0.0
    periods, choices = [], []
    for behind in range(min(last, total)):
        best, choice = np.full_like(after, np.inf), np.zeros(after.shape, dtype=np.int64)
        for m in filter(terms.allowed, range(1, total + 1)):
            stage = np.maximum(terms.compute_s(m), terms.reduce_s(0, 1, m))
            stage[terms.headroom(m) < behind] = np.inf
            budget.spend(comb(last + 1, 2) * (total + 1 - m))
            _prepend(stage, after, m, best, choice)
        after = np.maximum(best, cut)
        periods.append(best[0, total])
        choices.append(choice)
    behind, pieces = int(np.argmin(periods)), []
    if periods[behind] == np.inf:
        return None
    u, left = 0, total
    for choice in reversed(choices[: behind + 1]):
        m, s = divmod(int(choice[u, left]), last + 1)
        pieces.append(PlannedSpan(u, s, m))
        u, left = s, left - m
    return tuple(pieces)


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
        best, nested = stage[:, :starts].copy(), self.terms.states.nested
        splits = int(nested[:starts].sum(axis=0) @ nested.sum(axis=1))
        self.budget.spend(comb(size, 2) * splits)
        _join(stage, cut, best)
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
        best: A of 1, 2 .. components, of spans from the first few states.
    """

    cut: NDArray[np.float64]
    stage: NDArray[np.float64]
    best: NDArray[np.float64]


@compiled
def _join(stage: NDArray[np.float64], cut: NDArray[np.float64], best: NDArray[np.float64]) -> None:
    """Lower A, initially T, to the best of all cuts."""
    components, starts, states = best.shape
    for m in range(1, components):
        for n in range(m):
            for u in range(starts):
                for s in range(u + 1, states - 1):
                    first = max(best[m - n - 1, u, s], cut[s])
                    if first < np.inf:
                        for v in range(s + 1, states):
                            best[m, u, v] = min(best[m, u, v], max(first, stage[n, s, v]))


@compiled
def _prepend(stage: Matrix, after: Matrix, m: int, best: Matrix, choice: NDArray[np.int64]) -> None:
    """Prepend a stage on m devices: update ``best`` and its ``choice`` of m and s, [u, devices]."""
    states, counts = best.shape
    for u in range(states):
        for s in range(u + 1, states):
            if stage[u, s] < np.inf:
                for devices in range(m, counts):
                    longest = max(stage[u, s], after[s, devices - m])
                    if longest < best[u, devices]:
                        best[u, devices] = longest
                        choice[u, devices] = m * states + s
