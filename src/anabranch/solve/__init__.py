"""The one place that joins planner, schedule, weight policy and simulator.

``mode="sync"`` trains with a flush after every batch and minimises the step; ``mode="async"`` never
flushes and minimises the time from one mini-batch to the next.
"""

from __future__ import annotations

from anabranch.plans.prices import bottleneck_s_per_sample
from anabranch.solve.asynchronous.simulation import Simulated, require_asynchronous, simulate_async
from anabranch.solve.comparison import BASELINES, baselines, comparable, compare, compare_policies
from anabranch.solve.explanation.explanation import Explanation, explain
from anabranch.solve.faults import check_plan
from anabranch.solve.planner_options import options_of
from anabranch.solve.policy_choice import MODES, auto_policy, check_mode
from anabranch.solve.rewriting import choose_rewrite, gain_note, splits_of_tables
from anabranch.solve.schedule_choice import AUTO
from anabranch.solve.search import plan
from anabranch.solve.simulation import foreseen, ideal_step_s, simulate, synchronous

__all__ = [
    "AUTO",
    "BASELINES",
    "MODES",
    "Explanation",
    "Simulated",
    "auto_policy",
    "baselines",
    "bottleneck_s_per_sample",
    "check_mode",
    "check_plan",
    "choose_rewrite",
    "comparable",
    "compare",
    "compare_policies",
    "explain",
    "foreseen",
    "gain_note",
    "ideal_step_s",
    "options_of",
    "plan",
    "require_asynchronous",
    "simulate",
    "simulate_async",
    "splits_of_tables",
    "synchronous",
]
