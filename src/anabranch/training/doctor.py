"""An examination of a model: whether it can be captured, facts about it, and a first plan.

Nothing is trained or timed: the graph shows most, and seconds are those of a data sheet.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import numpy as np

from anabranch.cluster import Cluster
from anabranch.device.kinds import GPU
from anabranch.errors import AnabranchError, CaptureError
from anabranch.graph.capture import capture_workload
from anabranch.graph.digraph import path_before
from anabranch.graph.loss_kinds import LossKind
from anabranch.graph.opgraph import Granularity, Precision
from anabranch.plans.check import stage_bytes
from anabranch.plans.plan import Plan, memory_text
from anabranch.plans.prices import prices_of
from anabranch.profile.estimate import estimate
from anabranch.profile.profile import Profile
from anabranch.record.run import versions
from anabranch.runtime.assignment import refused_between_gpus
from anabranch.schedule import glossary
from anabranch.solve import plan
from anabranch.training.findings import findings_of, findings_without_capture
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
    findings = findings_without_capture(workload)
    name = model or type(workload.module).__name__
    try:
        captured = capture_workload(workload, granularity=granularity)
    except CaptureError as error:
        return Examination(name, versions(), str(error), findings=tuple(findings))
    findings += findings_of(captured, workload, batch_size)
    width, first, peaks = None, None, []
    counts = sorted({1 << i for i in range(batch_size.bit_length())} | {batch_size})
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            profile = estimate(captured.under_autocast(precision, GPU), device, counts)
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
