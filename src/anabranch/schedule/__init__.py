"""Schedules: a table of rules by name, and functions from stages to a checked schedule."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from anabranch.errors import UnknownScheduleError
from anabranch.plans.edges import EVERY_EDGE, MessageEdges
from anabranch.plans.stages import StageGraph
from anabranch.schedule.base import ScheduleRule
from anabranch.schedule.check import check_order, checked
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

LISTS = frozenset({"zb-h1", "zb-h2"})
"""List schedules, for which stages have the lengths of their passes and messages."""

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


def checked_order(graph: StageGraph, name: str, edges: MessageEdges = EVERY_EDGE) -> Schedule:
    """Return the checked schedule without messages; a simulation of it detects deadlocks."""
    order = compute_order(graph, name)
    check_order(order, graph, edges)
    return order


def compute_order(graph: StageGraph, name: str) -> Schedule:
    """Return the unchecked schedule without messages, for searches that price thousands."""
    return rule_named(name).order(graph)
