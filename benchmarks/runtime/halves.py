"""Gradients of inputs and of weights of a transformer stage: real ranks beside the profile.

Two ranks in a row under ``1f1b-split``, so that the second stage computes the halves of its
backwards as actions of their own, whose seconds a recorded step has. The profile has those of its
operators, each of which it measured with gradients of weights and without.
"""

from __future__ import annotations

import statistics

import anabranch
from anabranch import launch
from anabranch.cost import CostModel
from anabranch.models import build
from anabranch.runtime.pipeline import Pipeline
from anabranch.runtime.plan_parts import prepare
from anabranch.schedule.schedule import Kind
from anabranch.simulator.costs import ModelCosts
from anabranch.workload import Workload
from benchmarks.planners.common import Row, table
from benchmarks.runtime import ours, transformer

LAYERS, MICROBATCHES, SAMPLES, STEPS = 4, 8, 4, 7
SIZES = transformer.SIZES | {"layers": str(LAYERS)}

PASSES = {
    "forward": Kind.FORWARD,
    "gradients of inputs": Kind.INPUT_GRADIENT,
    "gradients of weights": Kind.WEIGHT_GRADIENT,
}


def rows() -> list[Row]:
    """One row per pass of the second stage: seconds, and its share of both halves."""
    workload = build("transformer", preset="small", options=SIZES)
    assert workload.data is not None
    batch = next(iter(workload.data(MICROBATCHES * SAMPLES, 0)))
    captured = ours.captured_model(workload.module, workload.example)
    profile = anabranch.measure(captured, (1, SAMPLES), repeats=5)
    plan = ours.plan_of(
        captured,
        lambda name: transformer.half(name, LAYERS),
        [[0], [1]],
        microbatches=MICROBATCHES,
        microbatch_size=SAMPLES,
        schedule="1f1b-split",
    )
    prepare(captured, plan.stage_graph)
    ranked = Workload(captured.module, workload.example, optimizer=ours.sgd)

    def rank() -> dict[Kind, list[float]]:
        pipeline = Pipeline(ranked, plan, captured=captured, check_gradients=False)
        found: dict[Kind, list[float]] = {kind: [] for kind in PASSES.values()}
        pipeline.step(batch)
        for _ in range(STEPS):
            pipeline.step(batch, record=True)
            assert pipeline.timeline is not None
            for span in pipeline.timeline.spans:
                if span.action.stage == 1 and span.action.kind in found:
                    found[span.action.kind].append(span.end - span.start)
        return found

    measured = {kind: statistics.median(each) for kind, each in launch.run(rank, 2)[0].items()}
    costs = ModelCosts(plan.stage_graph, CostModel(profile, anabranch.Cluster.preset("local:2")))
    priced = {kind: costs.pass_s(1, kind, SAMPLES) for kind in PASSES.values()}
    result = []
    for name, kind in PASSES.items():
        row: Row = {"pass": name, "measured_s": measured[kind], "profile_s": priced[kind]}
        if kind is not Kind.FORWARD:
            for source, seconds in (("measured", measured), ("profile", priced)):
                both = seconds[Kind.INPUT_GRADIENT] + seconds[Kind.WEIGHT_GRADIENT]
                row[f"{source}_share"] = seconds[kind] / both
        result.append(row)
    return result


def show(found: list[Row]) -> str:
    """Milliseconds, and shares of a backward."""
    lines = [
        [
            row["pass"],
            f"{row['measured_s'] * 1e3:.2f}",
            f"{row['profile_s'] * 1e3:.2f}",
            f"{row['measured_s'] / row['profile_s']:.2f}",
            *(
                f"{row[key]:.0%}" if key in row else "-"
                for key in ("measured_share", "profile_share")
            ),
        ]
        for row in found
    ]
    head = ["pass", "measured ms", "profile ms", "ratio", "share measured", "share by profile"]
    return table(head, lines)
