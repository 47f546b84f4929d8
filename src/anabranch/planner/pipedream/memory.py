"""PipeDream's recurrence within memory, with the number of stages that may follow.

A stage holds one micro-batch more than there are stages behind it, which the recurrence, from the
first layer on, does not know yet. For one bound on the period it is enough to know, for every span
and number q of stages in it, before how many further stages it still fits, its headroom. With a
first piece of p stages and a remainder of q - p::

    u ----------- s ----------- v ------ e more stages ------ end
      p stages        q - p

    headroom_q(u->v)  =  max over s, m', p of  min( headroom_p(u->s) - (q - p),
                                                    headroom_(q-p)(s->v) )

the recurrence with another quantity in place of the period. At the last level the rest of the model
is a number of stages, the fewer the better::

    fewest(u, m)  =  min over s, m', p of  p + fewest(s, m-m')    where headroom_p(u->s) allows it

The least bound is found by bisection. Tables hold the negative of a headroom: less is better.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from anabranch.planner.pipedream.product import least_longest
from anabranch.planner.pipedream.recurrence import bounds
from anabranch.planner.pipedream.terms import LASTING, Piece, Terms
from anabranch.planner.toolkit.budget import Budget

ABSENT = 1
"""In place of a negative headroom: fits nowhere, or exceeds the bound."""

Counts = NDArray[np.int16]
Choices = list[list[Counts]]
"""By number of components, then by number of stages, both from 1: negative headrooms [u, v]."""

_ROUNDS = 40
"""Bisections at most; only a period of 0 would need more."""


def solve(
    terms: Terms, budget: Budget, least_s: float, tolerance: float
) -> tuple[float, tuple[Piece, ...]] | None:
    """The least period of a plan in memory, and a plan with it; None if nothing fits.

    Args:
        least_s: no plan has a lesser period.
        tolerance: relative distance to the least period at which the search ends.

    Raises:
        BudgetError: if ``budget`` runs out.
    """
    low = least_s
    for bound in bounds(least_s):
        best = FittingRecurrence(terms, bound, budget).solve()
        if best is not None:
            break
        low = bound
    else:
        return None
    high = terms.period_s(best)
    for _ in range(_ROUNDS):
        if high <= low * (1 + tolerance):
            break
        middle = (low + high) / 2
        found = FittingRecurrence(terms, middle, budget).solve()
        if found is None:
            low = middle
        else:
            best, high = found, terms.period_s(found)
    return high, best


class FittingRecurrence:
    """Plans within a bound on the period and within memory."""

    def __init__(self, terms: Terms, bound: float, budget: Budget) -> None:
        self._terms = terms
        self._bound = bound
        self._budget = budget
        self._whole: dict[tuple[int, int], list[Counts]] = {}

    def solve(self) -> tuple[Piece, ...] | None:
        """A plan with the fewest stages, or None."""
        top = len(self._terms.tiers) - 1
        stage = [self._stage(top, 1, m) for m in range(1, self._terms.tiers[top].size + 1)]
        closed = self._closed(top, 1)
        last = len(self._terms.states) - 1
        none = np.full(last + 1, LASTING, dtype=np.int16)
        fewest = [np.where(np.arange(last + 1) == last, np.int16(0), none)]
        for m in range(1, len(stage) + 1):
            least = none.copy()
            for n, p, table in _choices(stage[:m]):
                rest = fewest[m - n]
                self._budget.spend(table.size)
                total = np.where(table + rest <= 0, rest + np.int16(p), np.int16(LASTING))
                np.minimum(least, total.min(axis=1), out=least)
            fewest.append(np.where(closed, none, least))
        if fewest[-1][0] >= LASTING:
            return None
        return self._pieces(top, stage, fewest)

    def _pieces(self, top: int, stage: Choices, fewest: list[Counts]) -> tuple[Piece, ...]:
        """The plan behind ``fewest``."""
        u, m = 0, len(stage)
        pieces = []
        while m:
            n, p, s = next(
                (n, p, int(at[0]))
                for n, p, table in _choices(stage[:m])
                for rest in [fewest[m - n]]
                if len(at := np.flatnonzero((table[u] + rest <= 0) & (rest + p == fewest[m][u])))
            )
            pieces.append(self._piece(top, 1, n, (u, s), (p, int(fewest[m - n][s]))))
            u, m = s, m - n
        return tuple(pieces)

    def _piece(
        self, level: int, copies: int, n: int, span: tuple[int, int], stages: tuple[int, int]
    ) -> Piece:
        """T on n components: a span, its stages and those behind it."""
        inside = self._inside(level - 1, copies * n, span, stages) if level else ()
        return Piece(*span, n, inside)

    def _inside(
        self, level: int, copies: int, span: tuple[int, int], stages: tuple[int, int]
    ) -> tuple[Piece, ...]:
        """The plan behind an entry of ``_table`` for a whole component."""
        stage, best = self._table(level, copies)
        closed = self._closed(level, copies)
        (u, v), (q, behind) = span, stages
        m = len(stage)
        pieces = []
        while not (q <= len(stage[m - 1]) and stage[m - 1][q - 1][u, v] <= -behind):
            n, p, s = next(
                (n, p, int(at[0]))
                for n, p, table in _choices(stage[: m - 1])
                if p < q <= p + len(best[m - n - 1])
                for rest in [best[m - n - 1][q - p - 1][:, v]]
                for first in [table[u] + np.int16(q - p)]
                if len(at := np.flatnonzero(~closed & (np.maximum(first, rest) <= -behind)))
            )
            pieces.append(self._piece(level, copies, n, (u, s), (p, behind + q - p)))
            u, m, q = s, m - n, q - p
        return (*pieces, self._piece(level, copies, m, (u, v), (q, behind)))

    def _closed(self, level: int, copies: int) -> NDArray[np.bool_]:
        """States at which no stage may end, as too much crosses them."""
        return np.asarray(self._terms.cut_s(level, copies) > self._bound)

    def _component(self, level: int, copies: int) -> list[Counts]:
        """By number of stages, on a whole component; level -1: a device."""
        if level < 0:
            seconds = self._terms.compute_s(copies)
            within = (seconds <= self._bound) & np.isfinite(seconds)
            return [np.where(within, -self._terms.headroom(copies), np.int16(ABSENT))]
        if (level, copies) not in self._whole:
            self._whole[level, copies] = self._table(level, copies)[1][-1]
        return self._whole[level, copies]

    def _stage(self, level: int, copies: int, m: int) -> list[Counts]:
        """T on m components, by number of stages; nothing where that is too many copies."""
        if not self._terms.possible(copies * m):
            return []
        within = self._terms.reduce_s(level, copies, m) <= self._bound
        inside = self._component(level - 1, copies * m)
        return [np.where(within, table, np.int16(ABSENT)) for table in inside]

    def _table(self, level: int, copies: int) -> tuple[Choices, Choices]:
        """T and A by number of components and stages."""
        size = self._terms.tiers[level].size
        closed = self._closed(level, copies)
        stage = [self._stage(level, copies, m) for m in range(1, size + 1)]
        best: Choices = []
        for m in range(1, size + 1):
            best.append([])
            for q in range(1, self._most(level, m) + 1):
                best[-1].append(self._series(stage, best, closed, (m, q)))
        return stage, best

    def _most(self, level: int, m: int) -> int:
        """Stages on m components of a level at most."""
        inside = int(np.prod([tier.size for tier in self._terms.tiers[:level]]))
        return min(m * inside, len(self._terms.states) - 1)

    def _series(
        self, stage: Choices, best: Choices, closed: NDArray[np.bool_], wanted: tuple[int, int]
    ) -> Counts:
        m, q = wanted
        count = len(self._terms.states)
        result = np.full((count, count), ABSENT, dtype=np.int16)
        if q <= len(stage[m - 1]):
            result = stage[m - 1][q - 1].copy()
        ends, begins = [], []
        for n, p, table in _choices(stage[: m - 1]):
            if p < q <= p + len(best[m - n - 1]):
                first = np.where(closed, np.int16(ABSENT), table + np.int16(q - p))
                ends.append(first.T)
                begins.append(best[m - n - 1][q - p - 1])
        if ends:
            least_longest(np.stack(ends), np.stack(begins), result, self._budget, most=0)
        return result


def _choices(stage: Choices) -> Iterator[tuple[int, int, Counts]]:
    """Components, stages and table of all that a piece may be."""
    for n, tables in enumerate(stage, start=1):
        for p, table in enumerate(tables, start=1):
            yield n, p, table
