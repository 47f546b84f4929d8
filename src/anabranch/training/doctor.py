"""An examination of a model: whether it can be captured, facts about it, and a first plan.

Nothing is trained or timed: the graph shows most, and seconds are those of a data sheet.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from dataclasses import dataclass

import numpy as np
from torch import nn

from anabranch.cluster import Cluster
from anabranch.device.kinds import USUAL
from anabranch.errors import AnabranchError, CaptureError, TrainingError, WorkloadError, some
from anabranch.graph.capture import Captured, capture_workload
from anabranch.graph.digraph import path_before
from anabranch.graph.loss_kinds import SENTENCES, LossKind, told
from anabranch.graph.opgraph import Granularity, Precision
from anabranch.graph.split import split
from anabranch.graph.whole_batch import WHOLE_BATCH_LOSS
from anabranch.plans.check import stage_bytes
from anabranch.plans.plan import Plan, memory_text
from anabranch.plans.prices import prices_of
from anabranch.profile.estimate import estimate
from anabranch.profile.profile import Profile
from anabranch.record.run import versions
from anabranch.runtime.assignment import refused_between_gpus
from anabranch.runtime.compute.programs import is_random
from anabranch.runtime.data_feed import refusal_of_data
from anabranch.runtime.optimizer_facts import refuse_unsupported, require_recipe_updates
from anabranch.schedule import glossary
from anabranch.solve import plan
from anabranch.workload import Workload


@dataclass(frozen=True)
class Branches:
    """Possible gain of a stage graph over a chain of stages.

    Attributes:
        operators: number of operators of the model.
        depth: operators on the longest path.
        width: branches that run side by side, on average: seconds of all operators over seconds of
            the longest path. 1 is a chain; more is the factor by which the way through a graph may
            be shorter, at best.
    """

    operators: int
    depth: int
    width: float


@dataclass(frozen=True)
class Examination:
    """Result of an examination.

    Attributes:
        error: reason why the model cannot be captured; empty if it can.
        findings: facts to know, one sentence each.
        plan: first plan to try, if there is one.
        peaks: (device, stage, bytes with nothing in flight, bytes at the peak).
    """

    model: str
    versions: dict[str, str]
    error: str = ""
    loss: LossKind | None = None
    findings: tuple[str, ...] = ()
    branches: Branches | None = None
    plan: Plan | None = None
    peaks: tuple[tuple[int, int, int, int], ...] = ()
    parameter_bytes: int = 0

    @property
    def capturable(self) -> bool:
        """Return True if the model can be captured."""
        return not self.error


def examine(
    workload: Workload,
    cluster: Cluster,
    batch_size: int,
    *,
    model: str = "",
    device: str = "v100",
    granularity: Granularity = "layer",
    precision: Precision | None = None,
) -> Examination:
    """Examine a model, and plan it for a cluster with the seconds of a data sheet.

    Args:
        workload: a workload, whose module may be on the meta device.
        device: a key of ``profile.data_sheets.DATA_SHEETS``.
        precision: precision of the autocast for which to plan.
    """
    findings = [*_of_module(workload.module), *_of_recipes(workload)]
    name = model or type(workload.module).__name__
    try:
        captured = capture_workload(workload, granularity=granularity)
    except CaptureError as error:
        return Examination(name, versions(), str(error), findings=tuple(findings))
    try:
        require_recipe_updates(workload, captured.graph)
    except TrainingError as error:
        findings.append(f"it cannot be trained: {error}")
    if refusal := refusal_of_data(captured, workload, batch_size):
        findings.append(f"it cannot be trained: {refusal}")
    findings += _of_graph(captured)
    width, first, peaks = None, None, []
    counts = sorted({1 << i for i in range(batch_size.bit_length())} | {batch_size})
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            profile = estimate(captured.under_autocast(precision, USUAL), device, counts)
        findings += [" ".join(str(warning.message).split()) for warning in warned]
        width = branches(profile)
        first = plan(profile, cluster, batch_size, model=name, improve=False)
        peaks = _peaks(first, profile, cluster)
        findings += refused_between_gpus(captured, first)
    except AnabranchError as error:
        findings.append(f"no plan: {error}")
    return Examination(
        name,
        versions(),
        loss=captured.graph.loss_kind,
        findings=tuple(findings),
        branches=width,
        plan=first,
        peaks=tuple(peaks),
        parameter_bytes=sum(captured.graph.parameter_bytes.values()),
    )


def branches(profile: Profile) -> Branches:
    """Return depth and width of a model, by its operators' seconds at the largest sample count."""
    graph = profile.graph
    seconds = np.array([cost.forward_s[-1] + cost.backward_s[-1] for cost in profile.costs])
    path_s, depth = (
        float((path_before(weights, graph.edges) + weights).max())
        for weights in (seconds, np.ones(len(graph)))
    )
    return Branches(len(graph), int(depth), float(seconds.sum()) / path_s if path_s else 1.0)


def _of_module(module: nn.Module) -> list[str]:
    findings = []
    parameters = list(module.parameters())
    frozen = sum(p.numel() for p in parameters if not p.requires_grad)
    total = sum(p.numel() for p in parameters)
    if frozen:
        findings.append(
            f"{frozen:,} of {total:,} parameters are frozen: no gradients, optimizer state or "
            "all-reduces of them are planned or made, and no backward where nothing before them "
            "is trained"
        )
    names: dict[int, list[str]] = defaultdict(list)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            names[id(parameter)].append(name)
    tied = [" = ".join(same) for same in names.values() if len(same) > 1]
    if tied:
        findings.append(
            f"tied weights: {some(tied)}; stages that share one each hold a copy, and their "
            "gradients are summed before every update"
        )
    return findings


def _of_recipes(workload: Workload) -> list[str]:
    """List reasons why the recipes make no optimizer and scheduler for the whole model, or a
    pipeline cannot use them.
    """
    trainable = [(name, p) for name, p in workload.module.named_parameters() if p.requires_grad]
    try:
        if trainable:
            optimizer = workload.make_optimizer(trainable)
            refuse_unsupported(optimizer, workload.make_scheduler(optimizer))
    except (WorkloadError, TrainingError) as error:
        return [f"it cannot be trained: {error}"]
    return []


def _of_graph(captured: Captured) -> list[str]:
    kind = captured.graph.loss_kind
    findings = [f"the loss is {SENTENCES[kind]}"] if kind else []
    coupled = {c.operator for c in captured.coupling}
    operators = [op.name for op in captured.graph.ops if op.name in coupled]
    if operators:
        first = next(c for c in captured.coupling if c.operator == operators[0])
        where = f"from {first.operation}{f' in {first.module}' if first.module else ''} on"
        if first.module == WHOLE_BATCH_LOSS:
            where = "in the loss alone"
        findings.append(
            f"samples depend on each other {where}: "
            f"{some(operators)} will have the whole batch, on one replica"
        )
    if captured.assumed and kind != "coupled":
        findings.append(
            f"the graph does not show whether {some(captured.assumed)} computes across samples: "
            "numbers of two halves of a batch decide, or Workload(per_sample=...)"
        )
    if kind != "coupled" and "coupled" in captured.totals.values():
        untold = [name for name, total in captured.totals.items() if total == "coupled"]
        findings.append(
            f"the metric {some(untold)} is no sum or mean over samples: what is shown is the "
            "mean of what the micro-batches have"
        )
    findings += told(None, captured.graph.normalised, captured.graph.stateful)
    whole = split(captured, [[op.name for op in captured.graph.ops]])
    if is_random(whole.program(0, captured.programs.samples).module):
        findings.append(
            "random numbers are drawn, as by dropout: another plan draws other ones, unless "
            'dropout="sample" makes them the same under any plan'
        )
    if captured.unused:
        findings.append(
            f"no gradient reaches {some(captured.unused)}: the loss does not depend on it; set "
            "requires_grad to False if that is meant"
        )
    return findings


def _peaks(plan: Plan, profile: Profile, cluster: Cluster) -> list[tuple[int, int, int, int]]:
    cost = prices_of(plan, profile, cluster)
    graph, rows = plan.stage_graph, []
    for s, stage in enumerate(graph.stages):
        weights, peak = (
            int(stage_bytes(graph, cost, s, in_flight=count)) for count in (0, stage.in_flight)
        )
        rows += [(device, s, weights, peak) for device in stage.devices]
    return sorted(rows)


def report(examination: Examination) -> str:
    """Return the examination as plain text, ready to be pasted into a report."""
    model, plan = examination.model, examination.plan
    versions = ", ".join(f"{name} {version}" for name, version in examination.versions.items())
    size = memory_text(examination.parameter_bytes)
    says = f"cannot be captured: {examination.error}"
    if examination.capturable:
        says = f"can be captured: {size} parameters"
    lines = [f"{model} {says}"]
    lines += [f"- {finding}" for finding in examination.findings]
    if (branches := examination.branches) is not None:
        says = "a chain: a graph of stages has nothing to gain over a sequential pipeline"
        if branches.width >= 1.05:
            says = (
                f"branches: the way through is {branches.width:.2f} times shorter than all "
                "operators one after the other, the most by which a graph of stages shortens "
                "filling and draining"
            )
        count = f"{branches.operators} operators, {branches.depth} on the longest path"
        lines += ["", f"{count}; {says}"]
    if plan is not None:
        under = f" --precision {plan.precision}" if plan.precision != "fp32" else ""
        is_here = plan.machines is not None and plan.machines.device == "cpu"
        yours = " (--cluster names your devices, such as local:2 for two ranks of this machine)"
        where = f"for {plan.cluster} with times from the data sheet of {plan.device}"
        lines += ["", f"the first plan to try, {where}{'' if is_here else yours}:", plan.summary()]
        lines += filter(None, [glossary(plan)])
        if is_here:
            lines.append(
                f"this machine was not timed, so its steps take longer or shorter: anabranch plan "
                f"{model} --cluster {plan.cluster} --batch-size {plan.stage_graph.batch_size}"
                f"{under} times the operators here"
            )
        lines += ["", "memory per device    stage    weights and state         at the peak"]
        lines += [
            f"{device:17d} {stage:8d} {memory_text(weights):>20s} {memory_text(peak):>19s}"
            for device, stage, weights, peak in examination.peaks
        ]
    return "\n".join([*lines, "", f"versions: {versions}"])
