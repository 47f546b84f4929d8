"""Plans for asynchronous training: planner, weight policy and simulator joined.

The counterpart of ``anabranch.solve`` without a flush.
"""

from __future__ import annotations

from anabranch.solve_async.modes import MODES, SCHEDULE, check_mode, recommended
from anabranch.solve_async.proposals import STREAM
from anabranch.solve_async.search import compare, plan
from anabranch.solve_async.simulated import (
    Simulated,
    check_plan,
    require_asynchronous,
    simulate,
    synchronous,
)

__all__ = [
    "MODES",
    "SCHEDULE",
    "STREAM",
    "Simulated",
    "check_mode",
    "check_plan",
    "compare",
    "plan",
    "recommended",
    "require_asynchronous",
    "simulate",
    "synchronous",
]
