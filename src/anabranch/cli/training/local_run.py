"""Training of a job on local ranks, or as one rank of torchrun."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from anabranch.cli import torchrun
from anabranch.cli.progress import TrainingProgress, announce
from anabranch.cli.training.job import Job
from anabranch.cli.training.restarts import surviving
from anabranch.cli.training.training_settings import TrainingSettings

if TYPE_CHECKING:
    from anabranch.cli.training.run_results import RunSoFar
    from anabranch.plans.plan import Plan
    from anabranch.record import Run
    from anabranch.training import Looks


def train_job(
    job: Job,
    training: TrainingSettings,
    *,
    is_async: bool = False,
    predicted_s: float = 0.0,
    on_interrupt: Callable[[], None] | None = None,
    fewer: Callable[[int], float] | None = None,
    so_far: RunSoFar | None = None,
    **options: Any,
) -> Run:
    """Train on local ranks, or as this rank of torchrun, with ``predicted_s`` (of a step or
    mini-batch) shown beside the measured; ``on_interrupt`` is that of ``launch.run``.

    Args:
        fewer: see ``surviving``.
        so_far: told of every step.
    """
    from anabranch import launch
    from anabranch.calibration.machine import OtherLoad
    from anabranch.runtime.asynchronous.requirements import asynchronous_stages, order_of
    from anabranch.runtime.compute.options import PLAIN
    from anabranch.runtime.guards.heartbeat import default_timeout_s
    from anabranch.runtime.guards.interrupt import listening
    from anabranch.runtime.guards.timeouts import TIMEOUTS
    from anabranch.runtime.plan_parts import prepare
    from anabranch.training import train, train_async

    plan, saves, logs = job.plan, training.saves(), training.loggers()
    timeout_s = training.timeout or default_timeout_s(predicted_s)
    # What the user says holds for first steps as well, unless they compile.
    patience_s = None if options.get("compute", PLAIN).backend else training.timeout
    passed_on = "epochs resume weights save check_gradients check_batches evaluate_every"
    assert plan is not None
    how = job.workload, job.source.precision, job.device
    prepare(job.captured, plan.stage_graph, *how)  # once, which forked ranks inherit
    if is_async:
        order = order_of(plan, asynchronous_stages(plan), in_turns=options.get("round_robin"))
        if order.round_robin:
            prepare(job.captured, order.for_turn(0, plan.stage_graph.batch_size), *how)
    elif (looks := looks_of(job, replans=training.replan)) is not None:
        options["looks"] = looks

    if so_far is not None:
        logs, options["on_trained"] = (*logs, so_far), so_far

    def rank(plan: Plan, predicted_s: float) -> Run:
        return (train_async if is_async else train)(
            job.workload,
            plan,
            **{name: getattr(training, name) for name in passed_on.split()},
            steps=training.last_step,
            captured=job.captured,
            save_every=saves,
            callbacks=(TrainingProgress(predicted_s, is_async=is_async), *logs),
            device=job.device,
            # Who watches is sooner.
            timeout=max(timeout_s, TIMEOUTS.patience_s) + TIMEOUTS.patience_s,
            stall_timeout=timeout_s,
            patience=patience_s,
            **options,
        )

    if torchrun.is_rank():
        with listening():
            return rank(plan, predicted_s)
    devices, load = len(plan.stage_graph.devices), OtherLoad()
    survival, recoveries = None, list[str]()
    if training.survive:
        assert fewer is not None
        survival = surviving(job, training, devices, fewer, predicted_s, recoveries.append)
        options["copies"] = survival.copies
    precision = options.get("compute", PLAIN).precision
    in_half = "" if precision in (None, "fp32") else f" in {precision}"
    announce(f"starting {devices} rank{'s' * (devices > 1)}{in_half}{_checks(job, training)}")
    try:
        run = launch.run(
            rank,
            devices,
            plan,
            predicted_s,
            stall_timeout=timeout_s,
            patience=patience_s,
            on_interrupt=on_interrupt,
            survival=survival,
        )[0]
    finally:
        if survival is not None:
            survival.copies.close()
    return replace(run, others_share=load.share(), recoveries=tuple(recoveries))


def _checks(job: Job, training: TrainingSettings) -> str:
    """Return words on what ranks check of the model before the first step."""
    from anabranch.runtime.reference import draws_random
    from anabranch.runtime.state.initialisation import meta_names

    if not training.check_gradients or training.steps == 0 or meta_names(job.workload.module):
        return ""
    if draws_random(job.captured):
        return ", and calling the model twice; gradients with random numbers are not compared"
    return ", and comparing gradients with one process"


def looks_of(job: Job, *, replans: bool) -> Looks | None:
    """Return predictions that training is compared with; None for a plan file without --replan."""
    from anabranch.solve.replanning import Replanner
    from anabranch.training import Looks

    assert job.plan is not None
    if job.is_by_file and not replans:
        return None
    graph = job.plan.stage_graph
    if not torchrun.is_first():
        return Looks(replans=replans)
    profile = job.profile or job.measure(graph.batch_size)
    # What a plan file has decided of memory and sums stays.
    options = job.search_options or {
        "shard_optimizer": job.plan.shard_optimizer,
        "sparse_embeddings": job.plan.sparse_embeddings,
    }
    replanner = Replanner(profile, job.cluster(len(graph.devices)), options)
    return Looks(replans=replans, replanner=replanner)
