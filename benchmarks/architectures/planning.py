"""Published sizes, captured on the meta device, estimated from a data sheet, and planned."""

from __future__ import annotations

import warnings
from typing import Any

import anabranch
from anabranch.errors import AnabranchError
from anabranch.graph.capture import capture
from anabranch.plans.plan import Plan
from anabranch.profile.profile import Profile
from benchmarks.architectures.models import build_published
from benchmarks.planners.common import processor_s

LARGE = 2e9
"""Parameters above which the cluster is of H100s with 80 GB, below of V100s with 16 GB."""

CLUSTERS = {"v100": "summit:8x4", "h100": "dgx-h100:4x8"}
"""32 devices of either kind."""

BATCH = 64


def planned(name: str) -> dict[str, Any]:
    """The plan of one architecture, beside data parallelism."""
    started = processor_s()
    found: dict[str, Any] = {"model": name}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            module, batch = build_published(name)
            count = sum(parameter.numel() for parameter in module.parameters())
            device = "h100" if count > LARGE else "v100"
            found |= {"class": type(module).__name__, "parameters": count, "device": device}
            captured = capture(module, batch)
            samples = tuple(1 << i for i in range(BATCH.bit_length()))
            profile = anabranch.estimate(captured, device, samples)
            found |= {
                "operators": len(captured.graph),
                "loss": captured.graph.loss_kind,
                "capture_s": round(processor_s() - started, 1),
            }
            return found | _plans(profile, anabranch.Cluster.preset(CLUSTERS[device]))
        except AnabranchError as error:
            text = " ".join(str(error).split())
            return found | {"error": f"{type(error).__name__}: {text}"}


def _plans(profile: Profile, cluster: anabranch.Cluster) -> dict[str, Any]:
    started = processor_s()
    chosen = anabranch.plan(profile, cluster, BATCH)
    graph = chosen.stage_graph
    return {
        "plan_s": round(processor_s() - started, 1),
        "stages": len(graph),
        "depth": graph.depth,
        "kind": _kind(chosen),
        "devices": len(graph.devices),
        "recompute": sum(stage.recompute for stage in graph.stages),
        "microbatch_sizes": sorted({stage.microbatch_size for stage in graph.stages}),
        "step_s": chosen.predicted.step_s,
        "data_parallel_step_s": step(profile, cluster, "data-parallel"),
        "chain_step_s": step(profile, cluster, "sequential") if _kind(chosen) == "graph" else None,
    }


def _kind(plan: Plan) -> str:
    graph = plan.stage_graph
    if len(graph) == 1:
        return "data parallel"
    return "chain" if graph.depth == len(graph) else "graph"


def step(
    profile: Profile, cluster: anabranch.Cluster, planner: str, **options: Any
) -> float | None:
    """Seconds of a baseline's step, None where it does not fit."""
    try:
        return anabranch.plan(profile, cluster, BATCH, planner=planner, **options).predicted.step_s
    except AnabranchError:
        return None
