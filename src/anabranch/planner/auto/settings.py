"""Settings: every tuned number of the search, in one place."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Settings:
    """What the search may spend, and where.

    Attributes:
        evaluations: drafts that are evaluated by default; twice as many take twice as long.
        starts: proposals of other planners that are annealed, the most promising ones of them,
            unlike each other; with more there is less time for each.
        rounds: every one anneals the better half of the drafts of the one before, each twice as
            long.
        hot: temperature at the beginning of a round, as a share of the step: a draft that is so
            much slower is taken with probability 1/e. Higher forgets where it came from: from 0.03
            on mmt and candle-uno at 32 devices end 6 % and 2 % slower; with 0.005 mmt 2 %.
        hotter: where the round before found nothing better: small models are at the end of what is
            near their starts soon, and the way to a better plan leads through much slower ones.
        cold: at its end.
        proposed: drafts that are proposed to the judge; each is simulated. 40 take a seventh longer
            in all for candle-uno and dlrm at 32 devices, and find nothing that is shorter.
        neighbours: drafts that are evaluated around the best plan in each round of its descent, and
            in the whole when a coarser model was searched first.
        near: the best of these, which are judged.
        most: operators and devices of a coarse problem, about; one with more operators, or twice
            as many devices, is searched coarsely first.
        error: how much slower than the plan they may seem: about as wrong as an evaluation can be.
    """

    evaluations: int = 20_000
    starts: int = 8
    rounds: int = 3
    hot: float = 0.01
    hotter: float = 0.3
    cold: float = 0.001
    proposed: int = 20
    neighbours: int = 1_000
    near: int = 6
    error: float = 0.05
    most: int = 128


SETTINGS = Settings()
