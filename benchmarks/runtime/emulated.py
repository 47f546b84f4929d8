"""The papers' models on 32 emulated V100s: does a step take what was predicted, and is the gain of
a graph plan the predicted one?

Ranks stand for the devices: compute waits its profiled time, messages take as long as on the
cluster's links, schedule and order of messages are the runtime's own. So is the processor time that
it takes for each forward and backward, which is this machine's: a second prediction knows it. Each
model is planned by ``auto`` and as a row; data parallelism has an all-reduce beside its last
backward.
"""

from __future__ import annotations

from collections.abc import Iterator

import anabranch
from anabranch.emulation.rehearsal import rehearse
from anabranch.plans.plan import Plan
from anabranch.profile.profile import Profile
from benchmarks.planners.cases import BATCHES
from benchmarks.planners.common import Row, profile_of, table

DEVICES = 32
GRAPHS = {"mmt": 64, "dlrm": 2048, "candle-uno": 32768}
"""Mini-batches of the models to plan; mmt's is one at which data parallelism does not win."""

PLANNERS = ("auto", "sequential")
DATA_PARALLEL = {"mmt": (1, 2, 4, 8), "candle-uno": (1, 2, 4, 8)}
"""Micro-batches of one step of data parallelism at the paper's mini-batch, by model."""

STEPS = 3
TIMEOUT_S = 120.0


def rows() -> Iterator[Row]:
    """One row per plan, as it has been rehearsed: a quarter of a minute each."""
    for model, counts in DATA_PARALLEL.items():
        batch = BATCHES[model][DEVICES]
        for count in counts:
            yield _row(model, batch, "data-parallel", batch // count)
    for model, batch in GRAPHS.items():
        for planner in PLANNERS:
            yield _row(model, batch, planner)


def _row(model: str, batch: int, planner: str, microbatch_size: int | None = None) -> Row:
    profile = profile_of(model, BATCHES[model][DEVICES])
    plan = anabranch.plan(
        profile,
        anabranch.Cluster.preset(f"summit:{DEVICES // 4}x4"),
        batch,
        planner=planner,
        microbatch_size=microbatch_size,
        model=model,
    )
    return {"model": model, "batch": batch, "planner": planner, **_rehearsed(plan, profile)}


def _rehearsed(plan: Plan, profile: Profile) -> Row:
    found = rehearse(plan, profile, steps=STEPS, timeout=TIMEOUT_S)
    return {
        "ranks": len(plan.stage_graph.devices),
        "stages": len(plan.stage_graph),
        "microbatches": plan.stage_graph.num_microbatches(0),
        "step_s": found.step_s,
        "predicted_s": plan.predicted.step_s,
        "predicted_with_runtime_s": found.with_runtime_s,
        "time_scale": found.time_scale,
        "late": found.late,
    }


def show(found: list[Row]) -> str:
    """Steps, measured and predicted, and how many times a row's step is of the graph's."""
    heads = ["model", "mini-batch", "planner", "stages", "micro-batches", "ms", "predicted"]
    heads += ["measured/predicted", "with runtime", "measured/that", "latest rank", "time scale"]
    lines = [
        [
            row["model"],
            f"{row['batch']}",
            row["planner"],
            f"{row['stages']}",
            f"{row['microbatches']}",
            f"{row['step_s'] * 1e3:.1f}",
            f"{row['predicted_s'] * 1e3:.1f}",
            f"{row['step_s'] / row['predicted_s']:.3f}",
            f"{row['predicted_with_runtime_s'] * 1e3:.1f}",
            f"{row['step_s'] / row['predicted_with_runtime_s']:.3f}",
            f"{row['late']:.1%}",
            f"{row['time_scale']:g}",
        ]
        for row in found
    ]
    return f"{table(heads, lines)}\n\n{_show_gains(found)}"


def _show_gains(found: list[Row]) -> str:
    steps = {(row["model"], row["batch"], row["planner"]): row for row in found}
    lines = []
    for model, batch in GRAPHS.items():
        plans = [steps.get((model, batch, planner)) for planner in PLANNERS]
        if None not in plans:
            graph, straight = plans
            gains = [straight[key] / graph[key] for key in ("step_s", "predicted_s")]
            lines.append([model, f"{batch}", *(f"{gain:.3f}" for gain in gains)])
    return table(["model", "mini-batch", "gain measured", "predicted"], lines)
