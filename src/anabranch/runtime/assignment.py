"""Assignment of a model to the ranks of a plan, the same on all ranks, which compare theirs."""

from __future__ import annotations

import multiprocessing
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import torch

from anabranch.device.accelerator import claim, default_gpu, prepare, settings
from anabranch.errors import InfeasiblePlanError, InvalidPlanError, TrainingError
from anabranch.graph.capture import Captured
from anabranch.graph.cutting.split import Split
from anabranch.graph.slices import whole_name
from anabranch.graph.tracing.changed_state import changed_by_samples
from anabranch.plans.plan import Plan
from anabranch.runtime.compute.options import require_exact
from anabranch.runtime.data_parallel.gradients import Holders
from anabranch.runtime.guards.agreement import facts_of, require_agreement
from anabranch.runtime.guards.memory_budget import lack
from anabranch.runtime.messages import channels
from anabranch.runtime.pipeline_options import PipelineOptions
from anabranch.runtime.plan_parts import buckets_of, captured_for, parts_of
from anabranch.runtime.ranks.mesh import Mesh
from anabranch.runtime.ranks.placement import own_device, start_of
from anabranch.runtime.ranks.process_groups import join, require_streams
from anabranch.runtime.state.initialisation import meta_names, require_constants
from anabranch.workload import Workload, updates_by_element


@dataclass(frozen=True)
class Assignment:
    """Stages of a model and the ranks that hold their parameters.

    Attributes:
        workload: the workload, with the module that was captured.
        options: options of the run, with the plan's for what was left out.
        home: device of the module before training.
        device: device on which this rank computes.
    """

    workload: Workload
    captured: Captured
    parts: Split
    holders: Holders
    options: PipelineOptions
    home: torch.device
    device: torch.device

    def require_memory(self, plan: Plan, mesh: Mesh) -> None:
        """Raise InfeasiblePlanError, on every rank, if predicted peaks exceed the memory."""
        parameters = self.captured.parameters()
        own, others = self.holders.resident_bytes(parameters, mesh.rank, self.device)
        # A forked rank shares the memory of the CPU with its parent, which gives nothing back.
        shares = self.device.type == "cpu" and multiprocessing.parent_process() is not None
        if problem := lack(plan, mesh, own, 0 if shares else others, self.device):
            raise InfeasiblePlanError(problem)


def assign(
    workload: Workload,
    plan: Plan,
    options: PipelineOptions,
    *,
    facts: Mapping[str, object],
    goes_on: bool,
) -> Assignment:
    """Cut the model by a plan, once all ranks are known to have the same model, plan and options.

    Args:
        facts: what else all ranks must have alike, by name.
        goes_on: whether training goes on from another plan, under which ranks have given up the
            tensors of other stages.

    Raises:
        InvalidPlanError: if the plan is for another model, or ranks disagree.
        CaptureError: if the module cannot be captured.
    """
    graph = plan.stage_graph
    options = options.under(plan)
    captured = (options.captured or captured_for(workload, plan)).plain
    buckets_of(captured, workload)
    module = captured.module
    home = start_of(module)
    device = home if options.device is None else own_device(options.device)
    prepare(device)
    claim(device)
    join(options.timeout)
    own = {"clip_norm": workload.clip_norm, "device": device.type}
    require_agreement(facts_of(captured, plan, {**options.facts(), **facts, **own}))
    if meta_names(module):
        require_constants(captured, device)
    parts = parts_of(captured, plan, exact=options.exact)
    if options.exact:
        require_exact(options.compute, captured.graph)
    job, holders = replace(workload, module=module), Holders.of(parts, graph)
    if goes_on:  # ranks get back row by row what they have forgotten
        for parameter in module.parameters():
            if any(parameter.stride()):
                parameter.data = parameter.data.contiguous()
    _require_single(captured, holders)
    trainable = {name: p for name, p in captured.parameters().items() if p.requires_grad}
    _require_slices_updated(job, trainable)
    if options.shard_optimizer:
        held = map(holders.held_by, range(len(graph.devices)))
        groups = {frozenset(names & trainable.keys()) for names in held}
        cut = all(updates_by_element(job, names) for names in groups if names)
        # Ranks give slices memory of their own (``ModelState``).
        layout = torch.contiguous_format
        like: dict[str, torch.Tensor] = {
            name: p
            if whole_name(name) == name
            else torch.empty_like(p, device="meta", memory_format=layout)
            for name, p in trainable.items()
        }
        holders = holders.sharded(like, cut=cut)
    return Assignment(job, captured, parts, holders, options, home, device)


def refused_between_gpus(captured: Captured, plan: Plan) -> list[str]:
    """Return why ranks with a GPU each refuse a plan for its connections, if they do."""
    graph, device = plan.stage_graph, default_gpu()
    pairs = {channel[:2] for channel in channels(graph)}
    sets = Holders.of(parts_of(captured, plan, exact=False), graph).sets
    try:
        require_streams([*pairs, *sets], len(graph.devices), device, settings(device))
    except InvalidPlanError as error:
        return [f"between GPUs of their own: {error}"]
    return []


def _require_single(captured: Captured, holders: Holders) -> None:
    """Raise InvalidPlanError where several ranks hold a parameter that the batch changes."""
    for name in changed_by_samples(captured.programs.example):
        if len(ranks := holders.parameters.get(name, ())) > 1:
            raise InvalidPlanError(
                f"ranks {', '.join(map(str, ranks))} hold copies of {name}, which the forward "
                "changes by the samples that it is given, as Embedding(max_norm) does, so the "
                "copies would drift apart: plan without replicas (--max-replicas 1), or leave out "
                "max_norm"
            )


def _require_slices_updated(workload: Workload, names: Collection[str]) -> None:
    """Raise TrainingError where slices of parameters meet an optimizer that needs whole ones."""
    cut = {whole_name(name) for name in names if whole_name(name) != name}
    if cut and not updates_by_element(workload, cut):
        raise TrainingError(
            f"the plan cuts {min(cut)}, but the optimizer of the Workload is not known to treat "
            "each element of a parameter alone, as SGD, Adam, AdamW and Adagrad do; take one that "
            "does, or plan with --rewrite none"
        )
