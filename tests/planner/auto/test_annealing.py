"""Simulated annealing: it finds the best of an objective that is known, and keeps the best few."""

import math
from collections import Counter
from dataclasses import replace
from random import Random

import numpy as np
import pytest

from anabranch.compiled import forked
from anabranch.planner.auto import annealing as annealing_module
from anabranch.planner.auto.annealing import Annealing
from anabranch.planner.auto.draft import Draft
from anabranch.planner.auto.moves import draw
from anabranch.planner.auto.settings import Settings
from anabranch.planner.auto.space import Space
from tests.planner.auto.test_moves import CHAIN, DIAMOND, draft, space
from tests.planner.helpers import cluster, linked_model

WHOLE = draft("000000", "000000")
SHORT = Settings(starts=4, proposed=5, hot=0.03)


def slowest(found: Draft, limit: float) -> float:
    """Work per device of the slowest stage, where stages are runs; infinity for gaps."""
    if (np.diff(found.op_stage) < 0).any() or (np.diff(found.op_stage) > 1).any():
        return math.inf
    work = np.bincount(found.op_stage) / np.bincount(found.device_stage)
    seconds = float(work.max()) + found.num_stages / 100
    return seconds if seconds < limit else math.inf


@pytest.mark.parametrize("edges", [CHAIN, DIAMOND])
def test_the_best_is_found(edges):
    """Six operators on six devices: each device one operator's work, with the fewest stages."""
    annealing = Annealing(space(edges), slowest, Random(0), SHORT)
    start = draft("000111", "000001")
    annealing.search([start], 500)
    best = annealing.best(1)[0]
    assert best.seconds == slowest(WHOLE, math.inf) == pytest.approx(1.01)
    assert best.moves > 0
    assert best.start == 0


def test_the_same_seed_finds_the_same():
    """And another seed goes another way."""

    def found(seed: int) -> list[float]:
        annealing = Annealing(space(CHAIN), slowest, Random(seed), SHORT)
        annealing.search([draft("001122", "000012")], 60)
        return [entry.seconds for entry in annealing.best(5)]

    assert found(1) == found(1)
    assert len({tuple(found(seed)) for seed in range(5)}) > 1


def test_long_evaluations_count_for_several(monkeypatch):
    """A quarter of the drafts is drawn where each counts for four."""
    monkeypatch.setattr(forked, "cores", lambda: 1)
    counts = []
    for effort in (1, 4):
        drawn: list[str] = []

        def counted(*args, drawn=drawn):
            drawn.append("")
            return draw(*args)

        monkeypatch.setattr(annealing_module, "draw", counted)
        monkeypatch.setattr(Space, "effort", lambda *_, effort=effort: effort)
        Annealing(space(CHAIN), slowest, Random(0)).search([draft("000111", "000001")], 120)
        counts.append(len(drawn))
    assert counts == [120, 30]


@pytest.mark.parametrize(("hotter", "least"), [(1e-6, 1.0), (1.0, 0.5)])
def test_a_way_is_hotter_where_the_one_before_found_nothing_better(hotter, least):
    """The only way from one stage to three, half as slow, leads through two that are slower."""

    def hilly(found: Draft, limit: float) -> float:
        seconds = {1: 1.0, 2: 1.5, 3: 0.5}.get(found.num_stages, math.inf)
        return seconds if seconds < limit else math.inf

    settings = Settings(starts=4, hot=1e-6, hotter=hotter, cold=1e-6)
    annealing = Annealing(space(CHAIN), hilly, Random(0), settings)
    annealing.search([WHOLE], 10_000)
    assert annealing.best(1)[0].seconds == least


def test_the_best_few_are_kept_in_order():
    """The ends of all ways come first; no two take equally long, and the quickest is an end."""
    annealing = Annealing(space(CHAIN), slowest, Random(0), SHORT)
    annealing.search([draft("001122", "001122"), draft("000111", "000111")], 30)
    kept = annealing.best(3)
    seconds = [found.seconds for found in kept]
    assert len(set(seconds)) == 3
    assert {found.start for found in kept[:2]} == {0, 1}
    assert seconds[:2] == sorted(seconds[:2])
    assert seconds[0] == min(seconds)


def test_a_way_ends_where_it_has_been_everywhere(monkeypatch):
    """Nothing is evaluated twice on it, not with other devices of a node either, but where it was
    cut short by a limit.
    """
    monkeypatch.setattr(forked, "cores", lambda: 1)
    asked: list[int] = []

    def alike(found: Draft, limit: float) -> float:
        asked.append(where.key(found))
        return 1.0

    where = Space(replace(linked_model(2, [(0, 1)]), cluster=cluster(2)), 2, (2,))
    annealing = Annealing(where, alike, Random(0), Settings(starts=2))
    start = draft("01", "01", microbatch=2)
    annealing.search([start], 10_000)
    assert 15 < len(asked) < 1_000
    assert max(Counter(asked).values()) == 2  # the start, before that


@pytest.mark.parametrize("cores", [2, 5])
def test_what_is_found_does_not_depend_on_the_number_of_cores(cores, monkeypatch):
    """Nor in which order."""

    def found() -> list[tuple[float, int, int]]:
        forks = replace(SHORT, worth_forking_s=0.0)
        annealing = Annealing(space(DIAMOND), slowest, Random(3), forks)
        starts = [draft("001122", "001122"), draft("000111", "000111"), WHOLE]
        annealing.search(starts, 200)
        return [(entry.seconds, entry.start, entry.moves) for entry in annealing.best(5)]

    monkeypatch.setattr(forked, "cores", lambda: cores)
    by_many = found()
    monkeypatch.setattr(forked, "cores", lambda: 1)
    assert by_many == found()


@pytest.mark.parametrize(("least_s", "times"), [(0.0, 2), (math.inf, 0)])
def test_short_rounds_stay_in_one_process(least_s, times, monkeypatch):
    """To fork another takes longer than they do; what they find is the same."""
    rounds = list[int]()

    def run_each(function, items):
        rounds.append(len(items))
        return [*map(function, items)]

    monkeypatch.setattr(forked, "run_each", run_each)
    settings = replace(SHORT, worth_forking_s=least_s)
    annealing = Annealing(space(CHAIN), slowest, Random(0), settings)
    annealing.search([draft("000111", "000001")], 500)
    assert annealing.best(1)[0].seconds == pytest.approx(1.01)
    assert len(rounds) == times


def test_starts_of_a_kind_are_evaluated_up_to_the_quickest():
    """Of those with as many stages and samples the quickest goes on, so others need not end. Each
    start has two warm-ups.
    """
    limits: list[float] = []

    def limited(found: Draft, limit: float) -> float:
        limits.append(limit)
        return slowest(found, limit)

    annealing = Annealing(space(CHAIN), limited, Random(0), SHORT)
    annealing.search([draft("000111", "000001"), draft("000111", "000111")], 0)
    assert limits == pytest.approx([math.inf, 3.02, 3.02, 1.02])
    assert [entry.start for entry in annealing.promising] == [1]


def test_nothing_that_can_run():
    """Then there is nothing to begin with, and nothing is found."""
    annealing = Annealing(space(CHAIN), lambda *_: math.inf, Random(0), SHORT)
    annealing.search([WHOLE], 100)
    assert annealing.best(5) == []
