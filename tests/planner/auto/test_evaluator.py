"""The evaluator and the simulator agree."""

from __future__ import annotations

import math

from anabranch.planner.auto.evaluator import Evaluator
from tests.planner import shapes
from tests.planner.auto.random_drafts import random_draft
from tests.planner.helpers import cost_model

TOWERS = shapes.towers("towers", 2, 1, layers=2, top=1)


def test_a_draft_takes_some_time():
    """One operator of each kind, on ample memory."""
    cost = cost_model(TOWERS, 4, memory=2**60)
    found = [
        Evaluator(cost, 8).step_s(random_draft(cost, 8, seed, plain=True)) for seed in range(20)
    ]
    assert any(math.isfinite(seconds) for seconds in found)
