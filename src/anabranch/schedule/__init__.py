"""Schedule rules, and the passes over schedules."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from anabranch.schedule.base import ScheduleRule
from anabranch.schedule.gpipe import GPipe
from anabranch.schedule.kfkb import KFKB

SCHEDULES: Mapping[str, Callable[[], ScheduleRule]] = {
    "1f1b": KFKB,
    "1f1b-deep": lambda: KFKB(per_hop=2),
    "gpipe": GPipe,
}
"""Name -> rule. ``1f1b`` has the smallest warm-up, ``1f1b-deep`` twice as much per stage edge."""


def rule_named(name: str) -> ScheduleRule:
    """The rule of that name.

    Raises:
        ValueError: if there is none.
    """
    if name not in SCHEDULES:
        raise ValueError(f"unknown schedule {name!r}; there are {', '.join(SCHEDULES)} and auto")
    return SCHEDULES[name]()
