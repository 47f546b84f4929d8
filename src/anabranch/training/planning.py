"""A plan for a workload in one call: captured, measured or estimated, rewritten where that pays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from inspect import signature
from typing import Any

from anabranch.calibration.kept import calibrated
from anabranch.calibration.machine import OtherLoad
from anabranch.cluster import Cluster
from anabranch.device.kinds import CPU, GPU, is_measured
from anabranch.errors import warn
from anabranch.graph.capture import Captured, capture_to_plan
from anabranch.graph.opgraph import Granularity, Precision
from anabranch.plans.plan import Plan
from anabranch.profile.estimate import estimate
from anabranch.profile.profile import Profile, powers_of_two
from anabranch.runtime.measurement.workload import measure_workload
from anabranch.runtime.state.optimizer_facts import optimizer_of
from anabranch.solve import plan, plan_with_rewrites
from anabranch.workload import Workload


def plan_workload(
    workload: Workload,
    cluster: Cluster,
    batch_size: int | None = None,
    *,
    captured: Captured | None = None,
    calibration: bool = True,
    device: str | None = None,
    precision: Precision | None = None,
    granularity: Granularity = "layer",
    rewrites: Sequence[str] | None = None,
    **options: Any,
) -> Plan:
    """Capture a workload and find the plan with the shortest simulated step, as the command
    ``plan`` does.

    Args:
        cluster: the devices.
        batch_size: samples of a step; by default those of the workload's data.
        captured: the module as it is written, from ``capture_to_plan``, if the caller has it.
        calibration: whether local ranks get the kept calibration of this machine, if there is one
            (``anabranch cluster --calibrate``).
        device: where operators are measured, ``cpu`` or a GPU that is here, or the data sheet by
            which they are estimated; by default the cluster's device.
        precision: ``bf16`` or ``fp16`` for a plan under autocast.
        granularity: see ``capture``.
        rewrites: rewrites of the model, such as ``join-split``; an empty list for none. By default
            those that make the step shorter are tried. Not for mode ``async``.
        options: further options of ``plan``.

    Raises:
        CaptureError: if the model cannot be captured.
        InfeasiblePlanError: if nothing fits the devices.
        ValueError: without a number of samples; for other errors see ``plan``.
        TypeError: for an option that ``plan`` does not have.
    """
    signature(plan).bind_partial(**options)  # before anything is measured
    size, where = batch_size or workload.batch_size, device or cluster.device
    cluster = calibrated(cluster)[0] if calibration else replace(cluster, calibration=None)
    if not size:
        raise ValueError(
            "the workload's data does not say how many samples a batch has; give batch_size"
        )
    is_async = options.get("mode") == "async"
    if is_async:
        options = {"optimizer": optimizer_of(workload), **options}
    counts = powers_of_two(size)

    def profile_of(names: Sequence[str]) -> Profile:
        chosen = captured
        if names or chosen is None:
            chosen = capture_to_plan(workload, granularity=granularity, rewrites=tuple(names))
        is_here = is_measured(where)
        chosen = chosen.under_autocast(precision, where.split(":")[0] if is_here else GPU)
        if not is_here:
            return estimate(chosen, where, counts)
        load = OtherLoad()
        profile = measure_workload(workload, counts, captured=chosen, device=where)
        if where == CPU and (text := load.remark(workload.name or "the model")):
            warn(text)
        return profile

    def search(profile: Profile) -> Plan:
        return plan(profile, cluster, size, **{"model": workload.name, **options})

    tried = plan_with_rewrites(
        profile_of(rewrites or ()), profile_of, search, tries=rewrites is None and not is_async
    )
    return tried.chosen()
