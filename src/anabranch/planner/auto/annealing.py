"""Simulated annealing over drafts: from several starts, the better half going on each round.

A move is drawn at random, and what it makes is taken if it is quicker, or by chance if it is
slower: Kirkpatrick, Gelatt and Vecchi, "Optimization by simulated annealing" (1983). Temperatures
are shares of the step, so that they mean the same for any model.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from random import Random
from typing import NamedTuple

from anabranch.compiled import forked
from anabranch.planner.auto.draft import Draft, variants
from anabranch.planner.auto.moves import MOVES, draw
from anabranch.planner.auto.settings import SETTINGS, Settings
from anabranch.planner.auto.space import Space

Evaluate = Callable[[Draft, float], float]
"""Draft, limit -> seconds; infinity where it cannot run or takes longer than the limit."""


class AnnealedDraft(NamedTuple):
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
        self._found: dict[float, AnnealedDraft] = {}
        self._ends: list[AnnealedDraft] = []
        self._under_way: list[list[AnnealedDraft]] = []  # what ways have passed
        self.promising: list[AnnealedDraft] = []
        """The starts that are annealed or could be, the quickest first."""

    def search(self, starts: Sequence[Draft], evaluations: int) -> None:
        """Anneal the most promising starts, in rounds; the ways of a round side by side."""
        settings, began = self._settings, time.perf_counter()
        self.promising, count = self._promising(starts)
        each_s = (time.perf_counter() - began) / max(count, 1)
        chosen, rounds = self.promising, settings.starts.bit_length() - 1
        for number in range(rounds if chosen else 0):
            chosen = _unlike(chosen)[: settings.starts >> number]
            share = evaluations // (rounds * len(chosen))
            given = [(start, share, self._rng.random()) for start in chosen]
            try:
                if each_s * share * len(given) < settings.worth_forking_s:
                    ways = [*map(self._anneal, given)]
                else:
                    ways = forked.run_each(self._anneal, given)
            except KeyboardInterrupt:
                self._keep(drafted for passed in self._under_way for drafted in passed)
                raise
            chosen = [end for end, _ in ways]
            self._ends += chosen
            self._keep(drafted for _, passed in ways for drafted in passed)

    def _anneal(
        self, way: tuple[AnnealedDraft, int, float]
    ) -> tuple[AnnealedDraft, list[AnnealedDraft]]:
        """The best draft on a way (start, most evaluations, seed), and the quickest on it."""
        start, evaluations, seed = way
        space, settings, rng = self._space, self._settings, Random(seed)
        here, passed, again = start, [start], 0
        self._under_way.append(passed)
        known: dict[int, tuple[float, float]] = {}  # draft -> seconds, the limit then
        temperature = settings.hotter if start.stuck else settings.hot
        cooling, spent = (settings.cold / temperature) ** (1 / max(evaluations, 1)), 0
        effort = space.effort(here.draft)
        while spent < evaluations:
            spent += effort
            temperature *= cooling**effort
            draft = draw(here.draft, space, rng)
            # So slow may it be to be taken; drawn first, as most evaluations end early.
            limit = here.seconds * (1 - temperature * math.log(1 - rng.random()))
            key = space.key(draft)
            seconds, asked = known.get(key, (math.inf, 0.0))
            again = again + 1 if asked else 0
            if again > 2 * len(MOVES):
                break
            if seconds == math.inf and asked < limit:
                seconds = self._evaluate(draft, limit)
                known[key] = seconds, limit
            if seconds < limit:
                here = AnnealedDraft(seconds, draft, here.start, here.moves + 1)
                effort = space.effort(draft)
                passed.append(here)
        quickest = {annealed.seconds: annealed for annealed in sorted(passed, key=_seconds)}
        if (best := min(passed, key=_seconds)) is start:
            best = start._replace(stuck=True)
        return best, [*quickest.values()][: settings.proposed]

    def best(self, count: int) -> list[AnnealedDraft]:
        """The ends of all ways, then others, the quickest first, no two of which take equally long:
        drafts of one way are alike, and so are the errors of their seconds.
        """
        ordered = (*sorted(self._ends, key=_seconds), *sorted(self._found.values(), key=_seconds))
        return [*{annealed.seconds: annealed for annealed in ordered}.values()][:count]

    def _promising(self, starts: Iterable[Draft]) -> tuple[list[AnnealedDraft], int]:
        """Starts that can run, unlike each other, and how many drafts were evaluated."""
        unlike: dict[tuple[int, int], AnnealedDraft] = {}
        count = 0
        for number, start in enumerate(starts):
            limit = unlike[_shape(start)].seconds if _shape(start) in unlike else math.inf
            for draft in variants(start, shared=self._space.shared, split=self._space.split):
                count += 1
                if (seconds := self._evaluate(draft, limit)) < limit:
                    limit = seconds
                    unlike.pop(_shape(start), None)  # the last one found is last among equals
                    unlike[_shape(start)] = AnnealedDraft(seconds, draft, number)
        promising = sorted(unlike.values(), key=_seconds)
        self._keep(promising)
        return promising, count

    def _keep(self, passed: Iterable[AnnealedDraft]) -> None:
        for annealed in passed:
            self._found.setdefault(annealed.seconds, annealed)


def _unlike(found: Iterable[AnnealedDraft]) -> list[AnnealedDraft]:
    """Keep drafts unlike each other, the quickest first."""
    unlike: dict[tuple[int, int], AnnealedDraft] = {}
    for entry in sorted(found, key=_seconds):
        unlike.setdefault(_shape(entry.draft), entry)
    return list(unlike.values())


def _shape(draft: Draft) -> tuple[int, int]:
    """Number of stages, and samples of a micro-batch of the first one."""
    return draft.num_stages, draft.setups["microbatch"][0]
