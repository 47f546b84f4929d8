"""Baselines: plans that others are compared with, and the words of the comparison."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Baseline(NamedTuple):
    """A plan that others are compared with.

    Attributes:
        words: its name for people.
        search: options of its search that replace the plan's; None where nothing is searched.
        is_chain: its stages are in a row.
    """

    words: str
    search: Mapping[str, Any] | None
    is_chain: bool = False


_CHAIN = {"planner": "chain", "planner_options": {"evaluations": 5_000}}
"""With all its evaluations planner chain takes up to ten seconds more for steps that are up to 3 %
shorter.
"""
_STRAIGHT = {"planner": "sequential", "max_replicas": 1}

BASELINES: Mapping[str, Baseline] = {
    "from": Baseline("the plan of --from", None),
    "data-parallel": Baseline("data parallelism", {"planner": "data-parallel"}),
    "sequential": Baseline("the sequential pipeline", {"planner": "sequential"}, True),
    "straight sequential": Baseline("the sequential pipeline without replicas", _STRAIGHT, True),
    "chain": Baseline("the best chain", _CHAIN, True),
    "one device": Baseline("one device", {"planner": "data-parallel"}),
}
"""Name of a baseline in files -> the baseline."""


def is_as_fast(other_s: float, step_s: float) -> bool:
    """Return True if two steps are equal to a reader: their ratio is 1 to two decimals."""
    return bool(step_s) and round(other_s / step_s, 2) == 1


def gain_text(baseline: str, other_s: float, step_s: float, mode: str = "sync") -> str:
    """Return how a step compares with that of a baseline, such as ``1.81x as fast as ...``.

    Args:
        mode: mode of both plans; baselines of an asynchronous plan have no flush either.
    """
    times = f"{other_s / step_s:.2f}x as fast as" if step_s else "in no time, unlike"
    if is_as_fast(other_s, step_s):
        times = "as fast as"
    return f"{times} {BASELINES[baseline].words}{' without a flush' if mode == 'async' else ''}"
