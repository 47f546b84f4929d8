"""A planner that proposes what a test wants."""

import pytest

from anabranch import planner as planners
from anabranch.plans.stages import StageGraph
from anabranch.solve import contest, schedule_choice
from tests.solve.helpers import Proposals


@pytest.fixture
def propose(monkeypatch):
    """Register proposals under the name ``test``."""

    def register(*graphs: StageGraph, planner=None) -> None:
        table = {"test": planner or (lambda: Proposals(graphs))}
        monkeypatch.setattr(planners, "PLANNERS", table, raising=False)

    return register


@pytest.fixture(autouse=True)
def whole_backwards(monkeypatch):
    """Searches stay with 1F1B, whose numbers can be read by eye; see ``test_schedule_choice``."""
    for module in (contest, schedule_choice):
        monkeypatch.setattr(module, "split_backwards", lambda *_, **__: None)
