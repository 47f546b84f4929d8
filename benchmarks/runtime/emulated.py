"""The papers' three models on emulated V100s: is the gain of a graph plan what was predicted?

Ranks stand for the devices: compute waits its profiled time, messages take as long as on the
cluster's links, schedule and order of messages are the runtime's own. Each model is planned as a
graph and as a row, both under ``auto``, and the two plans are rehearsed in turn.
"""

from __future__ import annotations

import statistics

import anabranch
from anabranch.errors import InfeasiblePlanError
from anabranch.plans.plan import Plan
from anabranch.profile.profile import Profile
from anabranch.rehearsal import Rehearsal, rehearse
from benchmarks.planners.cases import BATCHES
from benchmarks.planners.common import Row, profile_of, table

DEVICES = (8, 16, 32)
DATA_PARALLEL = {"mmt": (1, 2, 4, 8), "candle-uno": (1, 2, 4, 8)}
"""Micro-batches of one step of data parallelism on the most devices, by model."""
PLANNERS = ("graphpipe", "sequential")
TURNS, STEPS = 2, 3


def rows(devices: tuple[int, ...] = DEVICES, models: tuple[str, ...] = tuple(BATCHES)) -> list[Row]:
    """One row per model, number of devices and planner."""
    result = []
    for model in models:
        profile = profile_of(model, max(BATCHES[model].values()))
        for count in devices:
            plans = {}
            for planner in PLANNERS:
                try:
                    plans[planner] = anabranch.plan(
                        profile,
                        anabranch.Cluster.preset(f"summit:{count // 4}x4"),
                        BATCHES[model][count],
                        planner=planner,
                        model=model,
                    )
                except InfeasiblePlanError:
                    continue
            if count == max(devices):
                plans |= _data_parallel(model, profile, count)
            result += [
                {"model": model, "devices": count, **row} for row in _rehearsed(plans, profile)
            ]
    return result


def _data_parallel(model: str, profile: Profile, count: int) -> dict[str, Plan]:
    """Data parallelism, whose all-reduce goes on beside the last backward, by micro-batches."""
    batch = BATCHES[model][count]
    return {
        f"data-parallel, M = {number}": anabranch.plan(
            profile,
            anabranch.Cluster.preset(f"summit:{count // 4}x4"),
            batch,
            planner="data-parallel",
            microbatch_size=batch // number,
            model=model,
        )
        for number in DATA_PARALLEL.get(model, ())
    }


def _rehearsed(plans: dict[str, Plan], profile: Profile) -> list[Row]:
    runs: dict[str, list[Rehearsal]] = {planner: [] for planner in plans}
    for _ in range(TURNS):
        for planner, plan in plans.items():
            runs[planner].append(rehearse(plan, profile, steps=STEPS))
    return [
        {
            "planner": planner,
            "ranks": len(plan.stage_graph.devices),
            "depth": plan.stage_graph.depth,
            "step_s": statistics.median(each.step_s for each in runs[planner]),
            "predicted_s": plan.predicted.step_s,
            "time_scale": max(each.time_scale for each in runs[planner]),
            "late": max(each.late for each in runs[planner]),
        }
        for planner, plan in plans.items()
    ]


def show(found: list[Row]) -> str:
    """Steps, and the gain of the graph measured and predicted."""
    groups: dict[tuple[str, int], dict[str, Row]] = {}
    for row in found:
        groups.setdefault((row["model"], row["devices"]), {})[row["planner"]] = row
    lines = []
    for (model, devices), group in groups.items():
        cells = [
            f"{group[p]['step_s'] * 1e3:.1f} ({group[p]['predicted_s'] * 1e3:.1f})"
            if p in group
            else "does not fit"
            for p in PLANNERS
        ]
        gains = ["-"] * 3
        if len(group) == len(PLANNERS):
            measured, predicted = (
                group["sequential"][key] / group["graphpipe"][key]
                for key in ("step_s", "predicted_s")
            )
            gains = [f"{measured:.3f}", f"{predicted:.3f}", f"{measured / predicted:.3f}"]
        late = max(row["late"] for row in group.values())
        scale = max(row["time_scale"] for row in group.values())
        lines.append([model, f"{devices}", *cells, *gains, f"{late:.1%}", f"{scale:g}"])
    heads = ["model", "devices", *(f"{p} ms (predicted)" for p in PLANNERS)]
    heads += ["gain measured", "predicted", "measured/predicted", "latest rank", "time scale"]
    return f"{table(heads, lines)}\n\n{_show_data_parallel(found)}"


def _show_data_parallel(found: list[Row]) -> str:
    lines = [
        [
            row["model"],
            f"{row['devices']}",
            row["planner"],
            f"{row['step_s'] * 1e3:.1f}",
            f"{row['predicted_s'] * 1e3:.1f}",
            f"{row['step_s'] / row['predicted_s']:.3f}",
            f"{row['late']:.1%}",
        ]
        for row in found
        if row["planner"] not in PLANNERS
    ]
    heads = ["model", "devices", "plan", "ms", "predicted", "measured/predicted", "latest rank"]
    return table(heads, lines)
