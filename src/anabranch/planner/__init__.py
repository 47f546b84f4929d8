"""Planners: how a model is cut into stages and which devices get them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from anabranch.planner.base import Planner
from anabranch.planner.data_parallel import DataParallel
from anabranch.planner.even import Even
from anabranch.planner.exhaustive import Exhaustive
from anabranch.planner.graphpipe import GraphPipe
from anabranch.planner.sequential import Sequential

PLANNERS: Mapping[str, Callable[[], Planner]] = {
    "graphpipe": GraphPipe,
    "sequential": Sequential,
    "data-parallel": DataParallel,
    "exhaustive": Exhaustive,
    "even": Even,
}
"""Name on the command line -> planner with its default options."""
