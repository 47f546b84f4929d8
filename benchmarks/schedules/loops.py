"""Steps of planner auto with one stage on each device, and with several."""

from __future__ import annotations

from collections.abc import Iterator

import anabranch
from anabranch.cluster import Cluster
from anabranch.graph.capture import capture
from anabranch.plans.plan import Plan
from anabranch.profile.profile import Profile
from benchmarks.planners.common import profile_of, table

LLAVA = "LLaVA-7B"

CASES = (
    ("transformer", "summit:1x4", 4),
    ("transformer", "dapple-c:4", 8),
    ("transformer", "dapple-b:8", 16),
    ("transformer", "summit:2x4", 8),
    ("transformer", "summit:2x4", 32),
    ("transformer", "summit:4x4", 16),
    ("transformer", "summit:4x4", 64),
    ("mmt", "summit:2x4", 32),
    ("mmt", "summit:8x4", 64),
    ("mmt", "summit:8x4", 128),
    ("mmt", "summit:32x4", 64),
    ("candle-uno", "summit:2x4", 4096),
    ("candle-uno", "summit:8x4", 4096),
    ("dlrm", "summit:2x4", 256),
    ("dlrm", "summit:8x4", 256),
    (LLAVA, "dgx-h100:1x8", 16),
    (LLAVA, "dgx-h100:2x8", 32),
)
"""Model, cluster and mini-batch."""

LARGEST = {"mmt": 512, "dlrm": 2048, "candle-uno": 32768}
"""Samples of a profile at most; of others 64."""


def profile(model: str) -> Profile:
    """The estimated profile of a model."""
    if model != LLAVA:
        return profile_of(model, LARGEST.get(model, 64))
    from benchmarks.architectures.vision_language import build

    module, batch = build(model, "trained")
    counts = tuple(1 << i for i in range(7))
    return anabranch.estimate(capture(module, batch), "h100", counts, precision="tf32")


def loops(cases: tuple[tuple[str, str, int], ...] = CASES) -> str:
    """Return a table with a line for each case."""
    heads = ["model", "cluster", "batch", "one stage each, ms", "several, ms", "shorter by", "plan"]
    return table(heads, _lines(cases))


def _lines(cases: tuple[tuple[str, str, int], ...]) -> Iterator[list[str]]:
    for model, cluster, batch in cases:
        plans = [
            anabranch.plan(
                profile(model),
                Cluster.preset(cluster),
                batch,
                planner_options={"several": several},
            )
            for several in (False, True)
        ]
        apart, best = (plan.figures.step_s for plan in plans)
        steps = f"{apart * 1e3:.1f}", f"{best * 1e3:.1f}", f"{apart / best:.3f}x"
        yield [model, cluster, str(batch), *steps, _described(plans[1])]


def _described(plan: Plan) -> str:
    graph = plan.stage_graph
    if not graph.shares_devices:
        return "-"
    replicas = max(stage.replicas for stage in graph.stages)
    is_back = graph.stages[0].devices == graph.stages[-1].devices
    way = "there and back" if is_back else "again and again"
    return f"{len(graph)} stages of {replicas} replicas, {way}, {plan.schedule}"
