"""The planners that are compared, what each assumes, and one plan of one of them as a row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import anabranch
from anabranch.cost import CostModel
from anabranch.errors import AnabranchError
from anabranch.planner.exhaustive import MOST_OPERATORS
from anabranch.plans.plan import Plan
from anabranch.solve.bound import work_floor
from benchmarks.planners import table4
from benchmarks.planners.cases import Case
from benchmarks.planners.common import Row, figures, processor_s


@dataclass(frozen=True)
class Contestant:
    """A planner with its options.

    Attributes:
        planner: its name on the command line.
        objective: what it minimises.
        all_reduce: how its objective counts it.
        memory: what it takes a stage to hold.
    """

    planner: str
    objective: str
    all_reduce: str
    memory: str
    options: Mapping[str, Any] = field(default_factory=dict)


_GRAPH = "1F1B on the graph"
_ROW = "1F1B on a row"

CONTESTANTS: Mapping[str, Contestant] = {
    "auto": Contestant("auto", "simulated step", "overlapped, by buckets", "as simulated"),
    "chain": Contestant(
        "chain", "simulated step of a row", "overlapped, by buckets", "as simulated"
    ),
    "graphpipe": Contestant(
        "graphpipe", "slowest stage", "beyond the backward, per micro-batch", _GRAPH
    ),
    "sequential": Contestant(
        "sequential", "slowest stage of a row", "beyond the backward, per micro-batch", _ROW
    ),
    "straight": Contestant(
        "sequential", "slowest stage of a row", "none", _ROW, {"max_replicas": 1}
    ),
    "pipedream": Contestant(
        "pipedream", "slowest stage of a row", "beside compute, without a flush", _ROW
    ),
    "dapple": Contestant("dapple", "latency of a row", "in full, after the last backward", _ROW),
    "dapple, overlapped": Contestant(
        "dapple",
        "latency of a row",
        "beside the last backward",
        _ROW,
        {"planner_options": {"overlap_allreduce": True}},
    ),
    "piper": Contestant(
        "piper", "load of the slowest stage of a line", "added, per micro-batch", _ROW
    ),
    "data-parallel": Contestant(
        "data-parallel", "step of one stage", "overlapped", "one in flight"
    ),
    "even": Contestant("even", "equal compute in a row", "none", _ROW),
    "exhaustive": Contestant(
        "exhaustive",
        "simulated step",
        "overlapped, by buckets",
        _GRAPH,
        {"planner_options": {"every": True, "candidates": None}},
    ),
    "published": Contestant("", "the plan that DAPPLE's Table 4 prints", "-", "-"),
}


def applies(name: str, case: Case) -> bool:
    """Whether a contestant takes part in a case."""
    if name == "published":
        return case.group == "table4"
    if name == "exhaustive":
        return case.group == "small"
    if case.group == "scale":
        return name in ("auto", "graphpipe", "data-parallel")
    if case.group == "map":
        return name in ("auto", "chain", "graphpipe", "sequential", "data-parallel")
    return True


def measure(case: Case, name: str, folder: Path | None) -> Row:
    """Plan one case: a row as ``results`` describes it."""
    profile, machines = case.profile(folder), case.machines()
    row: Row = {
        "case": case.name,
        "group": case.group,
        "planner": name,
        "by": "anabranch",
        "date": date.today().isoformat(),
        "floor_s": work_floor(CostModel(profile, machines), case.batch),
    }
    if name == "published":
        return row | table4.published(profile, case)
    contestant = CONTESTANTS[name]
    started = processor_s()
    try:
        plan = anabranch.plan(
            profile, machines, case.batch, planner=contestant.planner, **contestant.options
        )
    except AnabranchError as error:
        row |= {"error": type(error).__name__, "message": str(error)[:300]}
    else:
        row |= figures(plan)
    row["cpu_s"] = processor_s() - started
    if name == "exhaustive":
        assert len(profile.graph) <= MOST_OPERATORS
    return row


def judged(case: Case, plan: Plan, name: str, by: str, folder: Path | None) -> Row:
    """A plan of somebody else's under our simulator, as a row."""
    profile, machines = case.profile(folder), case.machines()
    step_s = anabranch.simulate(plan, profile, machines, schedule="auto").step_s
    return figures(plan) | {
        "case": case.name,
        "group": case.group,
        "planner": name,
        "by": by,
        "date": date.today().isoformat(),
        "floor_s": work_floor(CostModel(profile, machines), case.batch),
        "step_s": step_s,
        "samples_per_s": case.batch / step_s,
    }
