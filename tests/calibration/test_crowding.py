"""What is lost per wait, computed from rounds as ranks have seen them."""

from __future__ import annotations

from anabranch.calibration.crowding import Turns, crowded_s


def test_idle_cores_are_shared_out_to_the_waits():
    """Two cores for 3 s are 6 s, of which three ranks computed 5; one second of idling for 4 waits.
    In a round without waits nothing is lost; the median of three rounds counts.
    """
    first = [Turns(0.0, 3.0, 2.0, 2), Turns(0.0, 2.5, 2.0, 1), Turns(0.5, 2.5, 1.0, 1)]
    calm = [Turns(5.0, 6.0, 0.5, 0)] * 3
    slow = [Turns(7.0, 9.0, 0.0, 1)] * 3
    ranks = list(zip(first, calm, slow, strict=True))
    assert crowded_s(ranks, cores=2) == 0.25
    assert crowded_s(ranks, cores=2 - 1 / 3) == 0.0, "others computed meanwhile"
    assert crowded_s([(), ()], cores=2) == 0.0
