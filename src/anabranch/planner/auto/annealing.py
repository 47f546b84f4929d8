"""Simulated annealing over drafts, from several starts; each round keeps the better half.

A random move makes a new draft, which is taken if it is faster, or by chance if it is slower:
Kirkpatrick, Gelatt and Vecchi, "Optimization by simulated annealing" (1983). Temperatures are
shares of the step, so that they mean the same for any model.

A walk is the drafts that annealing takes one after the other from one start in one round.
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
"""(draft, limit) -> seconds; infinity if it cannot run or takes longer than the limit."""


class AnnealedDraft(NamedTuple):
    """A draft with its seconds.

    Attributes:
        start: number of the start that it comes from.
        moves: number of moves from that start to it.
        stuck: whether a walk from it found nothing faster.
    """

    seconds: float
    draft: Draft
    start: int
    moves: int = 0
    stuck: bool = False


_seconds = attrgetter("seconds")


class Annealing:
    """One search, and the drafts that it has found so far."""

    def __init__(
        self, space: Space, evaluate: Evaluate, rng: Random, settings: Settings = SETTINGS
    ) -> None:
        self._space, self._evaluate, self._rng, self._settings = space, evaluate, rng, settings
        self._found: dict[float, AnnealedDraft] = {}
        self._ends: list[AnnealedDraft] = []
        self._under_way: list[list[AnnealedDraft]] = []  # drafts of each walk
        self.promising: list[AnnealedDraft] = []
        """Starts that can run, the fastest first."""

    def search(self, starts: Sequence[Draft], evaluations: int) -> None:
        """Anneal the most promising starts in rounds, in parallel processes if that pays."""
        settings, began = self._settings, time.perf_counter()
        self.promising, count = self._promising(starts)
        each_s = (time.perf_counter() - began) / max(count, 1)
        chosen, rounds = self.promising, settings.starts.bit_length() - 1
        for number in range(rounds if chosen else 0):
            chosen = _unlike(chosen)[: settings.starts >> number]
            share = evaluations // (rounds * len(chosen))
            tasks = [(start, share, self._rng.random()) for start in chosen]
            try:
                if each_s * share * len(tasks) < settings.worth_forking_s:
                    ways = [*map(self._anneal, tasks)]
                else:
                    ways = forked.run_each(self._anneal, tasks)
            except KeyboardInterrupt:
                self._keep(drafted for passed in self._under_way for drafted in passed)
                raise
            chosen = [end for end, _ in ways]
            self._ends += chosen
            self._keep(drafted for _, passed in ways for drafted in passed)

    def _anneal(
        self, way: tuple[AnnealedDraft, int, float]
    ) -> tuple[AnnealedDraft, list[AnnealedDraft]]:
        """Walk from a start; return the best draft, and the fastest ones of the walk.

        Args:
            way: the start, the most evaluations, and a seed.
        """
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
            # A draft beyond the limit is not taken; drawn first, so most evaluations end early.
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
        """Return the best drafts of all walks, then others, the fastest first; no two take equally
        long. Best drafts come first because drafts of one walk are alike, as are their errors.
        """
        ordered = (*sorted(self._ends, key=_seconds), *sorted(self._found.values(), key=_seconds))
        return [*{annealed.seconds: annealed for annealed in ordered}.values()][:count]

    def _promising(self, starts: Iterable[Draft]) -> tuple[list[AnnealedDraft], int]:
        """Return the starts that can run and differ in shape, and the number of evaluations."""
        unlike: dict[tuple[int, int], AnnealedDraft] = {}
        count = 0
        for number, start in enumerate(starts):
            limit = unlike[_shape(start)].seconds if _shape(start) in unlike else math.inf
            for draft in variants(start, shared=self._space.shared, split=self._space.split):
                count += 1
                if (seconds := self._evaluate(draft, limit)) < limit:
                    limit = seconds
                    unlike.pop(_shape(start), None)  # among equals the latest comes last
                    unlike[_shape(start)] = AnnealedDraft(seconds, draft, number)
        promising = sorted(unlike.values(), key=_seconds)
        self._keep(promising)
        return promising, count

    def _keep(self, passed: Iterable[AnnealedDraft]) -> None:
        for annealed in passed:
            self._found.setdefault(annealed.seconds, annealed)


def _unlike(drafts: Iterable[AnnealedDraft]) -> list[AnnealedDraft]:
    """Return the fastest draft of each shape, the fastest first."""
    unlike: dict[tuple[int, int], AnnealedDraft] = {}
    for entry in sorted(drafts, key=_seconds):
        unlike.setdefault(_shape(entry.draft), entry)
    return list(unlike.values())


def _shape(draft: Draft) -> tuple[int, int]:
    """Return the number of stages, and the samples of a micro-batch in the first stage."""
    return draft.num_stages, draft.setups["microbatch"][0]
