"""Simulated annealing over drafts: from several starts, the better half going on each round.

A move is drawn at random, and what it makes is taken if it is quicker, or by chance if it is
slower: Kirkpatrick, Gelatt and Vecchi, "Optimization by simulated annealing" (1983). Temperatures
are shares of the step, so that they mean the same for any model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from random import Random
from typing import NamedTuple

from anabranch.planner.auto.draft import Draft, both
from anabranch.planner.auto.moves import draw
from anabranch.planner.auto.settings import SETTINGS, Settings
from anabranch.planner.auto.space import Space

Evaluate = Callable[[Draft, float], float]
"""Draft, limit -> seconds; infinity where it cannot run or takes longer than the limit."""


class Found(NamedTuple):
    """A draft with its seconds, the number of its start, how many moves led from that to it, and
    whether a way from it has found nothing better.
    """

    seconds: float
    draft: Draft
    start: int
    moves: int = 0
    stuck: bool = False


_seconds = attrgetter("seconds")


class Annealing:
    """One search, with what it has found so far."""

    def __init__(
        self, space: Space, evaluate: Evaluate, rng: Random, settings: Settings = SETTINGS
    ) -> None:
        self._space, self._evaluate, self._rng, self._settings = space, evaluate, rng, settings
        self._found: dict[float, Found] = {}
        self._ends: list[Found] = []
        self._limit_s = math.inf
        self.promising: list[Found] = []
        """The starts that are annealed or could be, the quickest first."""

    def search(self, starts: Sequence[Draft], evaluations: int) -> None:
        """Anneal the most promising starts, in rounds."""
        settings, self.promising = self._settings, self._promising(starts)
        chosen = self.promising
        for number in range(settings.rounds if chosen else 0):
            chosen = sorted(chosen, key=_seconds)[: max(1, settings.starts >> number)]
            share = evaluations // (settings.rounds * len(chosen))
            chosen = [self.anneal(start, share) for start in chosen]
            self._ends += chosen

    def anneal(self, start: Found, evaluations: int) -> Found:
        """The best draft on a way of so many evaluations from a start."""
        here = best = start
        space, rng, settings = self._space, self._rng, self._settings
        temperature = settings.hotter if start.stuck else settings.hot
        cooling = (settings.cold / temperature) ** (1 / max(evaluations, 1))
        for _ in range(evaluations):
            temperature *= cooling
            _, draft = draw(here.draft, space, rng)
            if draft is None:
                continue
            # So slow may it be to be taken; drawn beforehand, as most evaluations end early then.
            limit = here.seconds * (1 - temperature * math.log(1 - rng.random()))
            seconds = self._evaluate(draft, limit)
            if seconds < limit:
                here = Found(seconds, draft, here.start, here.moves + 1)
                if seconds < self._limit_s:
                    self._keep(here)
                if seconds < best.seconds:
                    best = here
        return start._replace(stuck=True) if best is start else best

    def best(self, count: int) -> list[Found]:
        """The ends of all ways, then others, the quickest first, no two of which take equally long:
        drafts of one way are alike, and so are the errors of their seconds.
        """
        ordered = (*sorted(self._ends, key=_seconds), *sorted(self._found.values(), key=_seconds))
        return [*{found.seconds: found for found in ordered}.values()][:count]

    def _promising(self, starts: Iterable[Draft]) -> list[Found]:
        """Some starts unlike each other, the quickest first."""
        found = [
            Found(self._evaluate(draft, math.inf), draft, number)
            for number, start in enumerate(starts)
            for draft in both(start)
        ]
        unlike: dict[tuple[object, ...], Found] = {}
        for entry in sorted(found, key=_seconds):
            draft = entry.draft
            if entry.seconds < math.inf:
                self._keep(entry)
                shape = draft.num_stages, draft.setups["microbatch"][0], draft.chained
                unlike.setdefault(shape, entry)
        return list(unlike.values())

    def _keep(self, found: Found) -> None:
        self._found.setdefault(found.seconds, found)
        if len(self._found) >= 4 * self._settings.proposed:
            kept = sorted(self._found)[: 2 * self._settings.proposed]
            self._found = {seconds: self._found[seconds] for seconds in kept}
            self._limit_s = kept[-1]
