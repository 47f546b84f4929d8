"""What the tables of this benchmark share: profiles, plans and how figures are printed."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

import anabranch
from anabranch.cluster import Cluster
from anabranch.errors import BudgetError, InfeasiblePlanError
from anabranch.models import build
from anabranch.plans.plan import Plan
from anabranch.profile.profile import Profile

PLANNERS = ("graphpipe", "sequential", "pipedream", "dapple", "piper", "data-parallel", "even")
"""All but ``exhaustive``, which takes small graphs only."""

Row = dict[str, Any]


@cache
def profile_of(name: str, largest: int, **options: str) -> Profile:
    """The published size of a model, estimated for a V100 at 1, 2, 4 ... samples."""
    workload = build(name, options=options, meta=True)
    captured = anabranch.capture(workload.module, workload.example)
    return anabranch.estimate(captured, "v100", tuple(1 << i for i in range(largest.bit_length())))


def plan_row(
    planner: str, profile: Profile, cluster: str | Cluster, batch: int, **options: Any
) -> Row:
    """A plan as a row of figures, or the reason why there is none; a cluster or its preset."""
    machines = Cluster.preset(cluster) if isinstance(cluster, str) else cluster
    row: Row = {"planner": planner, "cluster": machines.name, "batch": batch}
    started = time.process_time()
    try:
        plan = anabranch.plan(profile, machines, batch, planner=planner, **options)
    except (BudgetError, InfeasiblePlanError) as error:
        spent = time.process_time() - started
        return row | {"error": type(error).__name__, "message": str(error), "cpu_s": spent}
    return row | figures(plan) | {"cpu_s": time.process_time() - started}


def figures(plan: Plan) -> Row:
    """What tables show of a plan."""
    graph = plan.stage_graph
    return {
        "step_s": plan.predicted.step_s,
        "samples_per_s": graph.batch_size / plan.predicted.step_s,
        "depth": graph.depth,
        "stages": len(graph),
        "replicas": [stage.replicas for stage in graph.stages],
        "operators": [len(stage.operators) for stage in graph.stages],
        "microbatch_size": graph.stages[0].microbatch_size,
        "recompute": sum(stage.recompute for stage in graph.stages),
        "schedule": plan.schedule,
        "peak_bytes": max(plan.predicted.device_peak_bytes),
        "search_s": plan.search_s,
        "simulate_s": plan.simulate_s,
        "improve_s": plan.improve_s,
    }


def median_search_s(find: Callable[[], Row], repeats: int = 3) -> float:
    """Median search seconds of several runs; NaN where there is no plan."""
    found = [row["search_s"] for row in (find() for _ in range(repeats)) if "search_s" in row]
    return statistics.median(found) if found else float("nan")


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def milliseconds(row: Row | None) -> str:
    """The step of a row, or why there is none."""
    if row is None:
        return "-"
    if "step_s" not in row:
        return "budget" if row["error"] == "BudgetError" else "does not fit"
    return f"{row['step_s'] * 1e3:.1f}"
