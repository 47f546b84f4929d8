"""Clusters that the user names, and remarks on plans that are for other machines."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import typer

from anabranch.cli.output import note, remark
from anabranch.cli.parsing import usage
from anabranch.cluster import Cluster
from anabranch.errors import InvalidPlanError
from anabranch.graph.opgraph import OpGraph
from anabranch.plans.plan import Plan


def read_cluster(text: str, *, calibrated: bool = True) -> Cluster:
    """Return a preset, or the cluster of a file; local ranks get this machine's calibration."""
    from anabranch.files import load_cluster

    return as_calibrated(usage(load_cluster, text), calibrated=calibrated)


def cluster_to_plan_for(text: str, *, calibrated: bool = True) -> Cluster:
    """Return ``read_cluster``; too many devices are refused here, before a model is captured."""
    from anabranch.planner.toolkit.problem import require_few_devices

    cluster = read_cluster(text, calibrated=calibrated)
    require_few_devices(cluster)
    return cluster


def as_calibrated(cluster: Cluster, *, calibrated: bool = True) -> Cluster:
    """Return local ranks with this machine's kept calibration, and remark on it."""
    if not calibrated:
        return replace(cluster, calibration=None)
    from anabranch.calibration import kept

    cluster, sentence = kept.calibrated(cluster)
    for text in (sentence, *kept.remarks(cluster)):
        if text:
            remark(text)
    return cluster


def note_other_model(plan: Plan, graph: OpGraph) -> None:
    """Say that a plan file was made for a model of another size, if that is so."""
    if text := plan.other_model(graph):
        note(text)


def remark_uncalibrated(plan: Plan) -> None:
    """Remark that a plan file for local ranks was predicted without a calibration, if it was."""
    from anabranch.calibration.kept import COMMAND, is_calibrated, is_local

    if plan.machines is not None and is_local(plan.machines):
        is_by_now = is_calibrated(plan.machines)
        todo = "this machine is calibrated by now: plan" if is_by_now else f"{COMMAND}, then plan"
        remark(
            f"the plan was made for {plan.machines.name} without a calibration, so its prediction "
            f"leaves out what ranks cost each other; {todo} again"
        )


def remark_crowded(plan: Plan) -> None:
    """Remark that there are more ranks than processor cores here, if the plan is for devices that
    compute independently; predictions for local ranks account for shared cores.
    """
    machines = plan.machines
    is_foreseen = machines.cores if machines is not None else plan.cluster.startswith("local:")
    ranks, cores = len(plan.stage_graph.devices), os.cpu_count() or 1
    if ranks > cores and not is_foreseen:
        remark(
            f"{ranks} ranks take turns on {cores} processor core{'s' if cores > 1 else ''} here, "
            f"but the plan for {plan.cluster} has a device for each, so how long steps take says "
            "nothing about the plan; anabranch rehearse waits as long as its devices would compute"
        )


def cluster_of(plan: Plan, file: Path, text: str | None, *, calibrated: bool = True) -> Cluster:
    """Return the cluster that the user names, or else the plan's; raise InvalidPlanError where a
    plan has only the name of a cluster of the user's own.
    """
    if text is not None:
        return read_cluster(text, calibrated=calibrated)
    if plan.machines is not None:
        return as_calibrated(plan.machines, calibrated=calibrated)
    try:
        return read_cluster(plan.cluster, calibrated=calibrated)
    except (ValueError, typer.BadParameter):
        raise InvalidPlanError(
            f"{file} was made for a cluster called {plan.cluster!r}, which is no preset, and does "
            "not say what that has; name the cluster file it was made for, or another cluster, "
            "with --cluster FILE"
        ) from None


def require_own_devices(plan: Plan, file: Path) -> None:
    """Accept a plan whose devices are all in its cluster, as others would have no links; raise
    InvalidPlanError naming the others.
    """
    machines = plan.machines
    if machines is None:
        try:
            machines = Cluster.preset(plan.cluster)
        except ValueError:
            return  # a cluster of the user's own, of which the plan has the name alone
    outside = [d for d in plan.stage_graph.devices if d >= machines.num_devices]
    if outside:
        raise InvalidPlanError(
            f"{file} has stages on device {', '.join(map(str, outside))}, but its cluster "
            f"{machines.name} has the devices 0-{machines.num_devices - 1} (C3); number the "
            "devices anew, or name a cluster in the plan that has them"
        )
