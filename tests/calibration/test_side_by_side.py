"""The table of slowdowns from what ranks were seen to do."""

from __future__ import annotations

import pytest

from anabranch.calibration.side_by_side import Pace, Paces, counts, lost_share, pace, slowdown


def test_counts_reach_past_the_cores():
    """Powers of two, the cores, one more and twice as many; no more than there are ranks."""
    assert counts(2, 8) == (1, 2, 3, 4)
    assert counts(6, 100) == (1, 2, 4, 6, 7, 12)
    assert counts(6, 5) == (1, 2, 4)


def paces(*seconds: dict[int, float]) -> list[tuple[Paces]]:
    """Ranks that had the same pace in each of two windows, with a core to themselves."""
    return [({k: [Pace(s, s)] * 2 if s else [] for k, s in rank.items()},) for rank in seconds]


def test_what_neighbours_take_and_turns_multiply():
    """On 2 cores: two ranks share the memory, of which the slower one counts (1.2), four also take
    turns (1.5 * 4 / 2).
    """
    seen = paces(
        {1: 1.0, 2: 1.1, 4: 1.5},
        {1: 0.0, 2: 1.2, 4: 1.25},
        {1: 0.0, 2: 0.0, 4: 1.5},
        {1: 0.0, 2: 0.0, 4: 1.5},
    )
    # Three are between two (1.2) and four (1.5): 1.35 * 3 / 2.
    assert slowdown(seen, cores=2) == pytest.approx((1.0, 1.2, 2.025, 3.0))


def test_ranks_beyond_the_cores_do_other_work():
    """On 2 cores: two take 1.5 times as long as one with much work, three 1.2 times with little,
    which alone takes half a second.
    """
    much = {1: [Pace(1.0, 1.0)], 2: [Pace(1.5, 1.5)]}
    little = {1: [Pace(0.5, 0.5)], 3: [Pace(0.6, 0.9)]}
    others = ({1: [], 2: much[2]}, {1: [], 3: little[3]}), ({1: [], 2: []}, {1: [], 3: little[3]})
    assert slowdown([(much, little), *others], cores=2) == pytest.approx((1.0, 1.5, 1.8))


def test_a_table_never_falls():
    """Noise may say that two are faster than one alone; three take turns on two cores anyway."""
    seen = paces({1: 1.0, 2: 0.9, 3: 0.9}, {1: 0.0, 2: 0.9, 3: 0.9}, {1: 0.0, 2: 0.0, 3: 0.9})
    assert slowdown(seen, cores=2) == (1.0, 1.0, 1.5)


def test_what_other_processes_took():
    """A rank alone that computed for 3 of 4 s shared its core with somebody else."""
    assert lost_share([({1: [Pace(0.75, 1.0)]},)]) == 0.25


def test_a_pace_is_of_whole_pieces():
    """At least one piece of work is done, however short the window is."""
    done: list[int] = []
    pace(lambda: done.append(1), window_s=0.0)
    assert done == [1]
