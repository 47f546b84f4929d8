"""PipeDream's recurrence with memory, on devices of one level.

A stage holds one micro-batch more than there are stages behind it, which the recurrence, from the
first layer on, does not know yet. From the last layer on it is known. With e stages behind the
first one of those that are left::

    A_e(u, m)  =  min over s, m' of  max( T(u->s, m')  where its headroom allows e,
                                          2 a_s / B,
                                          A_(e-1)(s, m-m') )
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from anabranch.compiled import compiled
from anabranch.planner.pipedream.terms import Matrix, PlannedSpan, Terms
from anabranch.planner.toolkit.budget import Budget


def solve(terms: Terms, budget: Budget) -> tuple[PlannedSpan, ...] | None:
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
            budget.spend(_prepend(stage, after, m, best, choice))
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


@compiled
def _prepend(stage: Matrix, after: Matrix, m: int, best: Matrix, choice: NDArray[np.int64]) -> int:
    """Prepend a stage on m devices: update ``best`` and its ``choice`` of m and s, [u, devices].

    Returns:
        Number of steps.
    """
    steps, (states, counts) = 0, best.shape
    for u in range(states):
        for s in range(u + 1, states):
            if stage[u, s] < np.inf:
                steps += counts - m
                for devices in range(m, counts):
                    longest = max(stage[u, s], after[s, devices - m])
                    if longest < best[u, devices]:
                        best[u, devices] = longest
                        choice[u, devices] = m * states + s
    return steps
