"""Schedules: a table of rules by name, and functions from stages to a checked schedule.

NumPy is imported where it is used, as the command line lists schedules in its help without it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from anabranch.errors import UnknownScheduleError
from anabranch.plans.edges import EVERY_EDGE, MessageEdges
from anabranch.plans.plan import Plan
from anabranch.plans.stages import StageGraph
from anabranch.schedule.base import ScheduleRule
from anabranch.schedule.check import checked
from anabranch.schedule.gpipe import GPipe
from anabranch.schedule.kfkb import KFKB
from anabranch.schedule.schedule import Schedule
from anabranch.schedule.zero_bubble import InputsFirst, ZeroBubble

SCHEDULES: Mapping[str, Callable[[], ScheduleRule]] = {
    "1f1b": KFKB,
    "1f1b-deep": lambda: KFKB(per_hop=2),
    "gpipe": GPipe,
    "1f1b-split": InputsFirst,
    "1f1b-deep-split": lambda: InputsFirst(increase=2),
    "zb-h1": ZeroBubble,
    "zb-h2": lambda: ZeroBubble(memory=2),
}
"""Name -> rule. ``1f1b`` has the smallest warm-up, ``1f1b-deep`` twice as much per stage edge."""

_IN_TURN, _SPLIT = "forward and backward in turn", "gradients of inputs before those of weights"
_DEEP = "after a longer warm-up"
ORDERS: Mapping[str, str] = {
    "1f1b": _IN_TURN,
    "1f1b-deep": f"{_IN_TURN}, {_DEEP}",
    "gpipe": "all forwards, then all backwards",
    "1f1b-split": f"{_IN_TURN}, {_SPLIT}",
    "1f1b-deep-split": f"{_IN_TURN}, {_DEEP}, {_SPLIT}",
    "zb-h1": _SPLIT,
    "zb-h2": f"{_DEEP}, {_SPLIT}",
}
"""Name -> the order of passes in words."""

LISTS = frozenset({"zb-h1", "zb-h2"})
"""List schedules, which need the lengths of passes and messages in the stages."""

SPLIT_BACKWARDS = LISTS | {"1f1b-split", "1f1b-deep-split"}
"""Schedules with gradients of inputs before those of weights, see ``zero_bubble``."""


def rule_named(name: str) -> ScheduleRule:
    """Return the rule with this name, or raise an ``UnknownScheduleError``."""
    if name == "auto":
        raise UnknownScheduleError(
            f"schedule 'auto' is none yet; name one of {', '.join(SCHEDULES)}, or have simulate "
            "or plan choose one"
        )
    if name not in SCHEDULES:
        raise UnknownScheduleError(
            f"unknown schedule {name!r}; there are {', '.join(SCHEDULES)} and auto"
        )
    return SCHEDULES[name]()


def glossary(plan: Plan) -> str:
    """Return the meaning of special words in a plan's summary; empty for a single stage."""
    graph = plan.stage_graph
    if len(graph) == 1:
        return ""
    k = ", k at a time" if any(graph.group_size(s) > 1 for s in range(len(graph))) else ""
    return (
        "depth: stages that a micro-batch passes one after another; in flight: micro-batches "
        f"between forward and backward in a stage, at most{k}; {plan.schedule}: "
        f"{ORDERS[plan.schedule]}"
    )


def schedule_of(graph: StageGraph, name: str, edges: MessageEdges = EVERY_EDGE) -> Schedule:
    """Return the checked schedule of a plan's stages, with its messages.

    Args:
        graph: stages with their in-flight counts decided; those of ``asynchronous.repeated`` where
            mini-batches follow without a flush.

    Raises:
        ValueError: if there is no such schedule.
        InvalidScheduleError: if the in-flight counts cannot be scheduled.
        DeadlockError: if devices would wait for each other.
    """
    return checked(compute_order(graph, name), graph, edges)


def compute_order(graph: StageGraph, name: str) -> Schedule:
    """Return the unchecked schedule without messages, for searches that price thousands."""
    return rule_named(name).order(graph)
