"""The benchmark of faults: every part counts one or two drawn cases."""

from typing import Any

import pytest

from benchmarks.faults import __main__, blame, checkpoints, hosts, processes, survival, unequal
from tests.benchmarks.small import small_two_branch

EXPECTED: dict[str, tuple[int, dict[str, Any]]] = {
    "damage": (2, {"refused, file named": 2, "silent": []}),
    "saves": (2, {}),
    "kills": (1, {"restarted and reached the last step": 1, "rank and phase named": 1}),
    "survivals": (1, {"killed, in runs": 1, "losses bitwise those of an undisturbed run": 1}),
    "copies": (2, {}),
    "hangs": (1, {"rank named first": 1}),
    "alive": (1, {"went on to their end": 1, "false alarms": []}),
    "blame": (1, {"held up": 1, "named right": 1, "wrong": []}),
    "schedules": (20, {"drawn": 20, "deadlocks among them": 0}),
    "cut": (1, {"cuts": 1}),
    "unequal": (1, {}),
}
"""Part -> number of cases, and some of its figures."""


def test_every_part_is_expected():
    """A new one would otherwise never be run here."""
    assert EXPECTED.keys() == __main__.PARTS.keys()


@pytest.mark.dist
@pytest.mark.parametrize("name", EXPECTED)
def test_a_part_counts(name: str, monkeypatch: pytest.MonkeyPatch):
    """With the figures that a large number of cases would have; those of time are not asserted."""
    monkeypatch.setattr(processes, "STEPS", 12)
    monkeypatch.setattr(survival, "STEPS", 12)
    monkeypatch.setattr(survival, "EVERY", 4)
    monkeypatch.setattr(hosts, "TIMEOUT_S", 2.0)
    monkeypatch.setattr(unequal, "STEPS", 2)
    monkeypatch.setattr(unequal, "BATCH", 16)
    monkeypatch.setattr(unequal, "OTHERS", (1,))
    for module in (blame, checkpoints, unequal):
        monkeypatch.setattr(module, "build", small_two_branch)
    count, expected = EXPECTED[name]
    figures = __main__.PARTS[name](count)
    if why := figures.get("skipped"):
        pytest.skip(why)
    assert figures
    assert {what: figures[what] for what in expected} == expected
