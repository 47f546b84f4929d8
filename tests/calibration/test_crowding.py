"""What is lost per wait, computed from rounds as ranks have seen them."""

from __future__ import annotations

from math import log

import pytest

from anabranch.calibration.crowding import Turns, crowding


def test_idle_cores_are_shared_out_to_the_waits():
    """In two rounds of three ranks cores idled 3 s and 1 s until the first was through: 1 s for
    each of 4 waits, at most; with short work half as much, behind 1.5 s of it.
    """
    first = [Turns(0.0, 3.0, 4.0, 1), Turns(0.5, 3.5, 4.0, 1), Turns(1.0, 4.0, 4.0, 0)]
    second = [Turns(5.0, 7.0, 4.0, 1), Turns(5.0, 6.5, 4.0, 1), Turns(5.0, 6.0, 4.0, 0)]
    long = [*zip(first, second, strict=True)]
    short = [[Turns(0.0, 1.0, 1.0, waits)] for waits in (1, 1, 0)]
    calm = [[Turns(0.0, 1.0, 1.0, 0)]] * 3
    half = crowding([*zip(short, long, strict=True)])
    assert half == (1.0, pytest.approx(1.5 / log(2)))
    assert crowding([(rounds, rounds) for rounds in long]) == (1.0, 0.0), "all at once"
    assert crowding([(rounds, rounds) for rounds in calm]) == (0.0, 0.0)
    assert crowding([[], []]) == (0.0, 0.0)


def test_what_work_loses_is_lost_in_the_long_work():
    """Behind short work nothing at all idled, or next to nothing: the most is that of 6 s of work.
    The kernel may tell less idling at the end of a round than at its begin; that is none.
    """
    long = [[Turns(0.0, 2.0, 6.0, 1)]] * 2
    for idle_s in (0.0, 0.01):
        short = [[Turns(0.0, idle_s, 1.0, 1)]] * 2
        assert crowding([*zip(short, long, strict=True)]) == (1.0, 6.0)
    fallen = [[Turns(1.0, 0.0, 6.0, 1)]] * 2
    assert crowding([*zip(fallen, fallen, strict=True)]) == (0.0, 0.0)
