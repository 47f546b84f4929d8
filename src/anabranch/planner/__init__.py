"""Planners: how a model is cut into stages and which devices get them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from anabranch.planner.base import Planner
from anabranch.planner.dapple import Dapple
from anabranch.planner.data_parallel import DataParallel
from anabranch.planner.even import Even
from anabranch.planner.exhaustive import Exhaustive
from anabranch.planner.graphpipe import GraphPipe
from anabranch.planner.pipedream import PipeDream
from anabranch.planner.piper import Piper
from anabranch.planner.sequential import Sequential

PLANNERS: Mapping[str, Callable[[], Planner]] = {
    "graphpipe": GraphPipe,
    "pipedream": PipeDream,
    "dapple": Dapple,
    "piper": Piper,
    "sequential": Sequential,
    "data-parallel": DataParallel,
    "even": Even,
    "exhaustive": Exhaustive,
}
"""Name on the command line -> planner with its default options."""
