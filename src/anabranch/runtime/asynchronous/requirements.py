"""Requirements of asynchronous training on plan, policy and workload, and the choice of a policy.

A plan for steps with a flush can train asynchronously as well, with the in-flight counts that its
schedule would have in a batch without end.
"""

from __future__ import annotations

import os
from dataclasses import replace

import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer

from anabranch.cluster import Cluster
from anabranch.cost import CostModel
from anabranch.errors import InvalidPlanError, PolicyError, warn
from anabranch.graph.capture import Captured
from anabranch.graph.cutting.split import Split
from anabranch.plans.check import require_one_stage_each, stage_bytes, tied_stages_error
from anabranch.plans.plan import Plan
from anabranch.plans.stages import StageGraph
from anabranch.profile.estimate import estimate
from anabranch.runtime.compute.options import ComputeOptions
from anabranch.runtime.state.optimizer_facts import facts_of
from anabranch.schedule import rule_named
from anabranch.schedule.asynchronous import AsynchronousOrder, full_pipeline, repeated, round_robin
from anabranch.schedule.kfkb import require_in_flight
from anabranch.weights import (
    OptimizerFacts,
    WeightPolicy,
    optimizer_remark,
    policy_named,
    recommend,
    require_fits,
    require_optimizer,
    versions_held,
)
from anabranch.workload import Workload


def asynchronous_stages(plan: Plan) -> StageGraph:
    """Return a plan's stages with their in-flight counts without a flush.

    Raises:
        InvalidPlanError: if the schedule is no 1F1B, or the micro-batches of an asynchronous plan
            differ in size.
        InvalidScheduleError: if the counts of an asynchronous plan rise along a stage edge, so that
            its stages would wait for each other.
    """
    graph, per_hop = plan.stage_graph, _per_hop(plan)
    if plan.mode == "async":
        num_microbatches(graph)
        # Within one mini-batch no count could be too large.
        most = max(stage.in_flight for stage in graph.stages)
        require_in_flight(repeated(graph, most + 1))
        return graph
    return full_pipeline(graph, per_hop=per_hop)


def _per_hop(plan: Plan) -> int:
    """Return how many more micro-batches a stage holds than the next one."""
    per_hop = rule_named(plan.schedule).per_hop
    if not per_hop or any(stage.k != 1 for stage in plan.stage_graph.stages):
        groups = max(stage.k for stage in plan.stage_graph.stages)
        raise InvalidPlanError(
            f"the plan's schedule is {plan.schedule}"
            f"{f', in groups of up to {groups} micro-batches' * (groups > 1)}; without a flush "
            "stages alternate one forward and one backward: plan with --mode async, or with "
            "--schedule 1f1b or 1f1b-deep"
        )
    return per_hop


def order_of(plan: Plan, graph: StageGraph, *, in_turns: bool | None) -> AsynchronousOrder:
    """Return the order in which a plan is trained.

    Args:
        graph: the stages from ``asynchronous_stages``.
        in_turns: whether replicas take mini-batches in turn; None: as the plan says.
    """
    is_replicated = any(stage.replicas > 1 for stage in graph.stages)
    if is_replicated and (plan.round_robin if in_turns is None else in_turns):
        return round_robin(plan.stage_graph, per_hop=_per_hop(plan))
    return AsynchronousOrder(graph, num_microbatches(graph))


def budgeted(
    plan: Plan,
    order: AsynchronousOrder,
    captured: Captured,
    policy: WeightPolicy,
    optimizer: Optimizer | None = None,
) -> Plan:
    """Return a plan with the peaks of a round-robin order, unless it predicts no peaks."""
    if plan.predicted is None or not any(plan.predicted.device_peak_bytes):
        return plan
    size = plan.stage_graph.batch_size
    cluster = plan.machines or Cluster.preset(f"local:{len(plan.stage_graph.devices)}")
    cost = CostModel(estimate(captured, samples=(size,)), cluster)
    whole, peaks = order.for_turn(0, size), dict[int, int]()
    last_update = optimizer is not None and facts_of(optimizer).keeps_last_update
    for s, stage in enumerate(plan.stage_graph.stages):
        held, deepest = order.in_flight[s], order.deepest(s)
        versions = versions_held(policy, in_flight=held, deepest=deepest, last_update=last_update)
        nbytes = stage_bytes(whole, cost, s, in_flight=held, versions=versions)
        peaks |= dict.fromkeys(stage.devices, int(nbytes))
    ordered = tuple(peaks[device] for device in plan.stage_graph.devices)
    return replace(plan, predicted=replace(plan.predicted, device_peak_bytes=ordered))


def num_microbatches(graph: StageGraph) -> int:
    """Return M, the micro-batches of a mini-batch, which must be the same for all stages."""
    counts = [graph.num_microbatches(s) for s in range(len(graph))]
    sizes = [stage.microbatch_size for stage in graph.stages]
    if len(set(counts)) > 1 or (counts[0] > 1 and len(set(sizes)) > 1):
        raise InvalidPlanError(
            f"the stages have micro-batches of {', '.join(map(str, sizes))} samples; without a "
            "flush all stages take a mini-batch in the same pieces, so that it is clear what an "
            "update has learned: plan with --mode async, or with one micro-batch size"
        )
    return counts[0]


def require_asynchronous(
    graph: StageGraph,
    order: AsynchronousOrder,
    parts: Split,
    policy: WeightPolicy,
    workload: Workload,
    compute: ComputeOptions,
) -> None:
    """Refuse what cannot be trained without a flush; checks the schedule as well.

    Args:
        graph: the stages from ``asynchronous_stages``; ``order`` is from ``order_of``.

    Raises:
        DeadlockError: if devices would wait for each other.
        InvalidPlanError: if a device has several stages, or stages share a trainable parameter.
        PolicyError: if the policy is not defined for such a plan, or the workload needs figures of
            all ranks together.
    """
    require_one_stage_each(graph)
    if parts.captured.cut:
        raise InvalidPlanError(
            f"the plan cuts {min(parts.captured.cut)}; without a flush its slices would be of "
            "different age: plan with --rewrite none, or train with --mode sync"
        )
    require_untied(parts, workload.module)
    order.schedule()
    require_fits(
        policy,
        graph,
        microbatches=num_microbatches(graph),
        round_robin=order.round_robin,
        batch_norms=[n for n, m in workload.module.named_modules() if isinstance(m, _NormBase)],
    )
    require_recipes(workload, compute)


def common_norm_remark(workload: Workload) -> str:
    """Return the reason why gradients cannot be clipped over all stages; empty if they are not."""
    if workload.clip_norm is None:
        return ""
    return (
        f"clip_norm {(norm := workload.clip_norm):g} is the norm over all stages, which would have "
        "to wait for each other in every update, and their gradients of one mini-batch are not "
        "there at one time; take clip_stage_norm in its place, which clips the gradients of each "
        "stage by themselves: anabranch train run.toml --trust, where the file says "
        f'model = "{workload.name or "MODEL"}", mode = "async" and clip-stage-norm = {norm:g} '
        "(other options, such as --plan, stay on the command line); or train with --mode sync"
    )


def clipped_by_stage(workload: Workload, clip_stage_norm: float | None) -> Workload:
    """Return the workload, without its norm over all stages if each stage has its own."""
    return workload if clip_stage_norm is None else replace(workload, clip_norm=None)


def require_recipes(
    workload: Workload, compute: ComputeOptions, policy: WeightPolicy | str | None = None
) -> None:
    """Refuse, without a plan, recipes that need figures of all ranks, and an unfit policy."""
    if remark := common_norm_remark(workload):
        raise PolicyError(remark)
    if compute.precision == "fp16":
        raise PolicyError(
            "fp16 scales the loss of a mini-batch by what the gradients of all stages did in the "
            "one before, and without a flush these are not known when its forward begins; take "
            "bf16, which needs no scale, or train with --mode sync"
        )
    if compute.is_replayed:
        raise PolicyError(
            f"compile {compute.compile} records where weights are, and without a flush a stage has "
            "several versions of them in turn; take another backend, or train with --mode sync"
        )
    if policy is not None:
        fitting(policy, _optimizer_of(workload), quiet=True)  # told where training begins


def require_untied(parts: Split, module: nn.Module) -> None:
    """Refuse stages that share a trainable parameter."""
    trainable = {name for name, p in module.named_parameters() if p.requires_grad}
    if tied := [entry for entry in parts.tied.items() if entry[0] in trainable]:
        raise tied_stages_error(tied[0][1], f"parameter {tied[0][0]}")


def choose(
    policy: WeightPolicy | str | None, plan: Plan, microbatches: int, workload: Workload
) -> tuple[WeightPolicy, str]:
    """Choose the policy, the same on every rank; the reason is empty if the user named it."""
    optimizer, reason = _optimizer_of(workload), ""
    policy = policy or plan.policy or "auto"
    if policy == "auto" and microbatches > 1:
        policy, reason = "2bw", f"it is the one for {microbatches} micro-batches per update"
    elif policy == "auto":
        # The plan has one micro-batch, which rules out 2bw.
        nothing = OptimizerFacts("nothing to train", momentum=False, rule="momentum")
        facts = facts_of(optimizer) if optimizer is not None else nothing
        policy, reason = recommend(plan.stage_graph.depth, facts)
    return fitting(policy, optimizer, quiet=not _is_first()), reason


def fitting(
    policy: WeightPolicy | str, optimizer: Optimizer | None, *, quiet: bool
) -> WeightPolicy:
    """Return the policy of a name, if it fits the optimizer.

    Args:
        quiet: do not warn if predictions from this optimizer are useless.

    Raises:
        PolicyError: for SpecTrain with anything but SGD with momentum, and the like.
    """
    chosen = policy_named(policy) if isinstance(policy, str) else policy
    if optimizer is not None:
        facts = facts_of(optimizer)
        require_optimizer(chosen, facts)
        if not quiet and (remark := optimizer_remark(chosen, facts)):
            warn(remark)
    return chosen


def _optimizer_of(workload: Workload) -> Optimizer | None:
    """Make the optimizer of the whole model; ranks without parameters have none of their own."""
    trainable = [(n, p) for n, p in workload.module.named_parameters() if p.requires_grad]
    return workload.make_optimizer(trainable) if trainable else None


def _is_first() -> bool:
    """Return True on rank 0, also before the process group exists."""
    first = dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))
    return first == 0
