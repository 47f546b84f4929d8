"""Predicted against measured peak memory of every built-in model.

python -m benchmarks.memory [--models mmt dlrm] [--ranks 2 4] [--json]

Small presets on local ranks, as a pipeline of a stage each under 1F1B, as data parallelism, and as
data parallelism that shares the optimizer's state, with the optimizer of each model. Measured is
the third step (``Pipeline.step(weigh=True)``): bytes of tensors that are alive at once, by rank.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from dataclasses import replace
from itertools import islice
from typing import Any

import torch

import anabranch
from anabranch import launch
from anabranch.cluster import Cluster
from anabranch.cost import CostModel
from anabranch.graph.capture import Captured
from anabranch.models import MODELS, build
from anabranch.plans.plan import Plan
from anabranch.profile.profile import Profile
from anabranch.runtime.pipeline import Pipeline
from anabranch.simulator.costs import ModelCosts
from anabranch.workload import Workload
from benchmarks.planners.common import Row, table

BATCH, SIZE = 64, 8
"""Samples of a step and of a micro-batch."""

WAYS = {
    "1f1b": ("sequential", 1, False),
    "data parallel": ("data-parallel", None, False),
    "sharded": ("data-parallel", None, True),
}
"""What runs -> planner, most replicas of a stage, whether they share the optimizer's state."""

LOW, HIGH = 0.05, 0.10
"""How far a prediction may be below the measurement, and from it at all, as shares of it."""


def rows(models: list[str], ranks: list[int]) -> list[Row]:
    """One row per model, number of ranks and way."""
    return [row for name in models for count in ranks for row in _model(name, count)]


def _model(name: str, ranks: int) -> list[Row]:
    workload = build(name, preset="small")
    captured = anabranch.capture(workload.module, workload.example)
    profile = anabranch.measure(captured, (SIZE // ranks, SIZE), repeats=1)
    result = []
    for way in WAYS:
        plan = _plan(profile, way, ranks)
        measured = _measured(workload, captured, plan, shard_optimizer=WAYS[way][2])
        predicted = _predicted(plan, profile, shard_optimizer=WAYS[way][2])
        result.append(
            {
                "model": name,
                "ranks": ranks,
                "way": way,
                "stages": len(plan.stage_graph),
                "measured_bytes": measured,
                "predicted_bytes": predicted,
                "ratio": [p / m for p, m in zip(predicted, measured, strict=True)],
            }
        )
    return result


def _plan(profile: Profile, way: str, ranks: int) -> Plan:
    planner, replicas, _ = WAYS[way]
    cluster = replace(Cluster.preset(f"local:{ranks}"), cores=0)
    return anabranch.plan(
        profile,
        cluster,
        BATCH,
        planner=planner,
        microbatch_size=SIZE,
        schedule="1f1b",
        max_replicas=replicas,
    )


def _predicted(plan: Plan, profile: Profile, *, shard_optimizer: bool) -> list[int]:
    """Of one stage on all devices, or as the plan has it."""
    if not shard_optimizer:
        return list(plan.figures.device_peak_bytes)
    assert plan.machines is not None
    cost, graph = CostModel(profile, plan.machines, shard_optimizer=True), plan.stage_graph
    costs, in_flight = ModelCosts(graph, cost), graph.stages[0].in_flight
    return [
        round(costs.held(0, replica).peak(in_flight)) for replica in range(graph.stages[0].replicas)
    ]


def _measured(workload: Workload, captured: Captured, plan: Plan, **options: bool) -> list[int]:
    def rank() -> tuple[int, ...]:
        pipe = Pipeline(
            workload, plan, captured=captured, check_gradients=False, timeout=120.0, **options
        )
        first, second, third = islice(pipe.batches(), 3)
        pipe.step(first)
        pipe.step(second)
        pipe.step(third, weigh=True)
        assert pipe.peak_bytes is not None
        return pipe.peak_bytes

    return list(launch.run(rank, len(plan.stage_graph.devices), timeout=600.0)[0])


def is_within(ratio: float) -> bool:
    """Whether a prediction is as near as it has to be."""
    return 1 - LOW <= ratio <= 1 + HIGH


def show(found: list[Row]) -> str:
    """MiB of the ranks, measured and predicted."""

    def mib(numbers: list[int]) -> str:
        return ", ".join(f"{number / 2**20:.2f}" for number in numbers)

    lines = [
        [
            row["model"],
            str(row["ranks"]),
            row["way"],
            mib(row["measured_bytes"]),
            mib(row["predicted_bytes"]),
            ", ".join(f"{ratio:.3f}" for ratio in row["ratio"]),
        ]
        for row in found
    ]
    head = [
        "model",
        "ranks",
        "way",
        "measured MiB, by rank",
        "predicted MiB",
        "predicted / measured",
    ]
    return table(head, lines)


def main() -> None:
    """Measure, then print a table or JSON; fails where a prediction is too far off."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--models", nargs="*", choices=MODELS, default=list(MODELS))
    parser.add_argument("--ranks", nargs="*", type=int, default=[2, 4])
    arguments = parser.parse_args()
    found = rows(arguments.models, arguments.ranks)
    ratios = [ratio for row in found for ratio in row["ratio"]]
    document: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "memory": found,
        "lowest": min(ratios),
        "highest": max(ratios),
        "within": all(map(is_within, ratios)),
    }
    if arguments.json:
        sys.stdout.write(json.dumps(document, indent=2) + "\n")
    else:
        sys.stdout.write(
            f"{show(found)}\n\npredicted / measured: lowest {min(ratios):.3f}, "
            f"highest {max(ratios):.3f}\n"
        )
    if not document["within"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
