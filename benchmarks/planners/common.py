"""What the tables of this benchmark share: profiles, plans and how figures are printed."""

from __future__ import annotations

import os
import platform
import resource
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import torch

import anabranch
from anabranch.models import build
from anabranch.plans.plan import Plan
from anabranch.profile.profile import Profile

Row = dict[str, Any]


@cache
def profile_of(name: str, largest: int, **options: str) -> Profile:
    """The published size of a model, estimated for a V100 at 1, 2, 4 ... samples."""
    workload = build(name, options=options, meta=True)
    captured = anabranch.capture(workload.module, workload.example)
    return anabranch.estimate(captured, "v100", tuple(1 << i for i in range(largest.bit_length())))


def machine() -> Row:
    """Versions and processor cores, for documents of figures."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": platform.machine(),
        "cores": os.cpu_count(),
    }


def processor_s() -> float:
    """Seconds of the processor so far, those of forked processes that have ended among them."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


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
