"""Options of torchtitan for a chain plan: names of modules per stage, and the schedule's file."""

from __future__ import annotations

from typing import Any

from torch import nn

from anabranch.graph.capture import Captured
from anabranch.graph.cutting.split import split
from anabranch.interchange.chain import StageChain, not_expressible
from anabranch.interchange.stages import StageModules, stage_modules
from anabranch.plans.plan import Plan

SCHEDULE_FILE = "schedule.csv"


def torchtitan_options(plan: Plan, captured: Captured, chain: StageChain) -> dict[str, Any]:
    """Return sections of torchtitan's configuration.

    ``model_part`` is the submodule that is torchtitan's model; empty for the whole module.

    Raises:
        NotExpressibleError: with every reason why torchtitan cannot express the plan.
    """
    stages = plan.stage_graph.stages
    modules = stage_modules(split(captured, [stage.operators for stage in stages]))
    root = _model_part(captured.module, modules)
    reasons = [*_name_reasons(captured.module, modules, root)]
    if chain.ranks != tuple(s % chain.num_ranks for s in range(len(stages))):
        reasons.append(
            f"torchtitan puts stage s on rank s mod {chain.num_ranks}, and the plan has its stages "
            f"on ranks {', '.join(map(str, chain.ranks))}"
        )
    recomputed = {stage.recompute for stage in stages}
    if len(recomputed) > 1:
        reasons.append(
            "some stages recompute activations and others do not, and torchtitan has one mode"
        )
    if reasons:
        way = "plan with --granularity block, which cuts between whole blocks"
        raise not_expressible("torchtitan", reasons, way)
    start = f"{root}." if root else ""
    return {
        "model": plan.model,
        "model_part": root,
        "parallelism": {
            "pipeline_parallel_degree": chain.num_ranks,
            "data_parallel_replicate_degree": chain.replicas,
            "data_parallel_shard_degree": 1,
            "pipeline_parallel_schedule": "PipelineScheduleMulti",
            "pipeline_parallel_schedule_csv": SCHEDULE_FILE,
            "pipeline_parallel_microbatch_size": chain.microbatch_size,
            "module_fqns_per_model_part": [
                [name.removeprefix(start) for name in names if name.startswith(start)]
                for names in modules.names
            ],
        },
        "training": {"local_batch_size": chain.microbatch_size * chain.num_microbatches},
        "activation_checkpoint": {"mode": "full" if True in recomputed else "none"},
    }


def _model_part(module: nn.Module, modules: StageModules) -> str:
    """Return the innermost opened module, no list, that contains all parameters."""
    names = [name for name, _ in module.named_parameters()]
    parts = [
        path
        for path in modules.opened
        if all(name.startswith(f"{path}.") for name in names if path)
        and not isinstance(module.get_submodule(path), nn.ModuleList | nn.ModuleDict)
    ]
    return max(parts, key=len, default="")


def _name_reasons(module: nn.Module, modules: StageModules, root: str) -> list[str]:
    """Return sentences on cuts other than between children and between list entries."""
    cut: list[str] = []
    for path in modules.opened:
        part = module.get_submodule(path)
        is_list = isinstance(part, nn.ModuleList | nn.ModuleDict)
        is_entry = path == root or (is_list and path.rpartition(".")[0] == root)
        is_inside = any(path.startswith(f"{outer}.") for outer in cut)
        if path and not f"{root}.".startswith(f"{path}.") and not is_entry and not is_inside:
            cut.append(path)
    reasons = [
        f"a cut goes through {path} ({type(module.get_submodule(path)).__name__}), and torchtitan "
        "cuts between children of the model and between entries of its lists"
        for path in cut
    ]
    for s, names in enumerate(modules.loose):
        reasons += [
            f"stage {s} holds the parameter {name}, which belongs to no module that lies in the "
            "stage, and torchtitan keeps such a one in all stages"
            for name in names
        ]
    return reasons
