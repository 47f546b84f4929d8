"""Searches whose plans are no matter."""

from dataclasses import replace

import pytest

from anabranch.planner.auto import planner as auto_planner
from anabranch.solve import contest, schedule_choice


def shorten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans of DAPPLE and GraphPipe are no starts, and few plans are simulated."""
    few = replace(auto_planner.SETTINGS, evaluations=100, further=50, few=0, row=0.0)
    monkeypatch.setattr(auto_planner, "SETTINGS", few)
    shorter = replace(
        contest.SETTINGS, share_proposals=2, split_proposals=4, most_loops=2, loop_turns=2
    )
    for module in (contest, schedule_choice):
        monkeypatch.setattr(module, "SETTINGS", shorter)
