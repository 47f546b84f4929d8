"""Planners: how a model is cut into stages and which devices get them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from anabranch.planner.base import Planner


def _planner(home: str, name: str, **fixed: Any) -> Callable[..., Planner]:
    """Return a maker of planners that imports the module when called: names alone cost nothing."""

    def make(**options: Any) -> Planner:
        planner: Planner = getattr(import_module(f"{__name__}.{home}"), name)(**fixed, **options)
        return planner

    return make


PLANNERS: Mapping[str, Callable[..., Planner]] = {
    "auto": _planner("auto.planner", "Auto"),
    "chain": _planner("auto.planner", "Auto", shape="chain"),
    "graphpipe": _planner("graphpipe.planner", "GraphPipe"),
    "pipedream": _planner("pipedream.planner", "PipeDream"),
    "dapple": _planner("dapple.planner", "Dapple"),
    "piper": _planner("piper.planner", "Piper"),
    "sequential": _planner("graphpipe.planner", "GraphPipe", chained=True),
    "data-parallel": _planner("data_parallel", "DataParallel"),
    "even": _planner("even", "Even"),
    "exhaustive": _planner("exhaustive", "Exhaustive"),
}
"""Name on the command line -> maker of the planner, which takes its options."""
