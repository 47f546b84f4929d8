"""What waits cost, as a table."""

from __future__ import annotations

import pytest

from anabranch.calibration import restarts
from anabranch.calibration.restarts import WAITS_S, ascending, measure_restarts, most_lost_s


def test_a_table_never_falls():
    """Noise may say that work is faster behind a wait, or behind a longer one."""
    assert ascending({1.0: -0.5, 2.0: 0.5, 3.0: 0.25}) == ((1.0, 0.0), (2.0, 0.5), (3.0, 0.5))


def test_most_is_lost_in_the_first_work():
    """Of 2 s, .9 in the first second and 1.6 in two: all but 1/e in about 1.5 s. Where nothing is
    lost, it is lost at once.
    """
    assert most_lost_s([1.0, 2.0, 3.0], [0.9, 1.6, 2.0]) == pytest.approx(1.52, abs=0.01)
    assert most_lost_s([1.0, 2.0], [0.0, -1.0]) == 0.0


def test_every_wait_has_its_figure(monkeypatch: pytest.MonkeyPatch):
    """Two rounds are enough to see that the table is one that a calibration takes."""
    monkeypatch.setattr(restarts, "_ROUNDS", 2)
    found = measure_restarts()
    assert tuple(wait for wait, _ in found.longer) == WAITS_S
    longer = [seconds for _, seconds in found.longer]
    assert longer == sorted(longer)
    assert longer[0] >= 0
