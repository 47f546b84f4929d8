"""A plan's stages as parts of the captured model, for training and for evaluation."""

from __future__ import annotations

from collections import Counter

from anabranch.errors import DataError, InvalidPlanError, some
from anabranch.graph.capture import Captured, capture_workload
from anabranch.graph.cutting.split import Split, split
from anabranch.graph.opgraph import Precision
from anabranch.plans.plan import Plan
from anabranch.plans.stages import StageGraph
from anabranch.plans.whole_batch import sliced_batches
from anabranch.schedule import SCHEDULES
from anabranch.workload import Workload


def captured_for(workload: Workload, plan: Plan) -> Captured:
    """Capture the model the way the plan's operators are named."""
    return capture_workload(workload, granularity=plan.granularity, rewrites=plan.rewrites)


def buckets_of(captured: Captured, workload: Workload) -> list[Captured]:
    """Return the captured model for each bucket of batch sizes that the workload declares.

    Raises:
        DataError: if the declared examples are no batches of the model.
    """
    try:
        return [captured, *map(captured.like, workload.buckets)]
    except ValueError as error:
        raise DataError(f"Workload.buckets: {error}") from error


def prepare(
    captured: Captured,
    graph: StageGraph,
    workload: Workload | None = None,
    precision: Precision | None = None,
    device_type: str = "cpu",
) -> None:
    """Specialise the program to the sample counts that a plan needs, in all sizes of batches of a
    workload, for evaluation as well; forked ranks inherit it.
    """
    for alike in [captured] if workload is None else buckets_of(captured, workload):
        sizes = {size for s in range(len(graph)) for size in graph.slice_sizes(s)}
        whole = {graph.batch_size} if alike.programs.statistics else set()
        for samples in sorted(sizes | whole):
            alike.under_autocast(precision, device_type).programs.at(samples)
        alike.programs.require_alike(graph.batch_size)
        if workload is not None and workload.eval_data is not None:
            alike.evaluation().under_autocast(precision, device_type)


def parts_of(captured: Captured, plan: Plan, *, exact: bool) -> Split:
    """Cut the model into the plan's stages.

    Raises:
        InvalidPlanError: if the plan is for another model, or its stages are not what the model's
            graph allows.
        ValueError: if exact gradients are asked of a plan that cannot give them.
    """
    graph = plan.stage_graph
    if plan.schedule not in SCHEDULES:
        raise InvalidPlanError(
            f"the plan has the schedule {plan.schedule!r}; known are {', '.join(sorted(SCHEDULES))}"
        )
    _check_operators(captured, plan)
    if problems := sliced_batches(graph, captured.graph):
        raise InvalidPlanError("; ".join(problems))
    if exact and not can_be_exact(graph):
        raise ValueError(
            "gradients that are bitwise those of one process need one replica per stage, and one "
            "micro-batch size for all stages"
        )
    if exact and plan.rewrites:
        raise ValueError(
            f"{', '.join(plan.rewrites)} adds in another order than the module does, so gradients "
            "are not bitwise those of one process; plan with --rewrite none"
        )
    try:
        parts = split(captured, [stage.operators for stage in graph.stages], exact=exact)
    except ValueError as error:
        raise InvalidPlanError(f"the plan does not cut this model: {error}") from error
    missing = {(port.source, port.target) for port in parts.ports} - set(graph.edges)
    if missing:
        x, y = min(missing)
        raise InvalidPlanError(
            f"stage {x} makes what stage {y} reads, but the plan has no edge {x} -> {y} (C2); "
            "plan again"
        )
    return parts


def can_be_exact(graph: StageGraph) -> bool:
    """Return whether all stages have the same micro-batches, and one replica."""
    sizes = {stage.microbatch_size for stage in graph.stages}
    return len(sizes) == 1 and all(stage.replicas == 1 for stage in graph.stages)


def _check_operators(captured: Captured, plan: Plan) -> None:
    planned = Counter(name for stage in plan.stage_graph.stages for name in stage.operators)
    model = {op.name for op in captured.graph.ops}
    problems = [
        f"{what}: {some(names)}"
        for what, names in (
            ("the plan lacks operators of the model", sorted(model - set(planned))),
            ("the model lacks operators of the plan", sorted(set(planned) - model)),
            ("in several stages", sorted(n for n, count in planned.items() if count > 1)),
        )
        if names
    ]
    if problems:
        made = " ".join(
            f"--preset {value}" if name == "preset" else f"-o {name}={value}"
            for name, value in plan.options
            if name != "preset" or ":" not in plan.model  # built-in models have presets
        )
        raise InvalidPlanError(
            f"the plan does not fit {type(captured.module).__name__} captured by "
            f"{captured.granularity}: {'; '.join(problems)}; "
            + (f"the plan was made with {made}: give the same, or " if made else "")
            + "plan this model, with the same options"
        )
