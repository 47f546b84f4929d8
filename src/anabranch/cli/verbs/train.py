"""The verb ``train``: a model on local ranks, under torchrun, or a plan on emulated devices."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from anabranch.cli import torchrun
from anabranch.cli.clusters import remark_crowded, remark_uncalibrated
from anabranch.cli.output import INTERRUPTED, note, say, say_remarks
from anabranch.cli.progress import announce
from anabranch.cli.settings import OtherModelSettings
from anabranch.cli.spread import options_set, spread
from anabranch.cli.training import preflight, restarts, run_results, training_settings
from anabranch.cli.training.job import Job
from anabranch.cli.training.local_run import train_job
from anabranch.cli.training.run_plan import plan_of_run
from anabranch.cli.verbs.rehearse import STEPS, LinkSettings, emulate, planned_in_file
from anabranch.errors import InvalidPlanError

T = TypeVar("T")


@spread
def train(
    model: training_settings.RunSettings,
    local: training_settings.TrainedPlanSettings,
    training: training_settings.TrainingSettings,
    compute: training_settings.ComputeSettings,
    flush: training_settings.FlushSettings,
    emulated: Annotated[bool, typer.Option("--emulate")] = False,
    run: Annotated[Path | None, typer.Option("--out")] = None,
) -> None:
    """Train MODEL as a pipeline, on local ranks or under torchrun.

    Where plain data parallelism is predicted to be faster, the plan is that: one stage with
    replicas. --max-replicas 1 asks for a pipeline.

    Example: `anabranch train two-branch --devices 4 --steps 50`, or
    `torchrun --nproc-per-node 2 -m anabranch train two-branch --steps 50`

    With --mode async there is no flush between mini-batches, and --policy says which weights
    forwards and backwards read: `anabranch train two-branch --devices 4 --mode async`

    With another --device than cpu stages are computed on GPUs, one rank per GPU or several, which
    torchrun starts on one host or on many.

    With --save run --save-every 10m there are checkpoints during training, and --resume run goes on
    from the newest; --max-restarts 3 does that by itself where a rank fails. With --survive the
    other ranks live on, and a few steps are done again from copies in memory.

    `anabranch train run.toml` has all of this from a file: `steps = 50`, `save-every = "10m"`, and
    keys that are no options, such as `keep` and `clip-stage-norm` (docs/command-line.md).

    Ctrl-C ends training after the step under way: the checkpoint of --save, the figures and the
    report are written as far as it came, and the exit code is 130. A second Ctrl-C stops at once.

    Args:
        emulated: No training: what `rehearse` does with --plan.
    """
    preflight.require_new_run(run)
    announce("loading PyTorch")
    if emulated:
        _rehearse(model, local, [training, compute, flush], training.steps, run)
        return
    began = time.time()
    ranks = torchrun.begin_surviving() if training.survive else None
    if ranks is not None and local.plan_file is None:
        local = replace(local, devices=local.devices or ranks)
    from anabranch.graph.loss_kinds import loss_notes
    from anabranch.record import Run
    from anabranch.runtime.asynchronous.requirements import clipped_by_stage
    from anabranch.schedule import glossary

    options, seed = compute.options(), training.seed
    if torchrun.is_restarted():
        training = restarts.restarted(training)
    is_async = flush.is_async(local.plan())
    preflight.refuse_mode(is_async, flush, compute, training)
    preflight.require_possible(training)
    job = _seeded(partial(Job.of, model.source, local), seed)
    if compute.precision is not None:
        job.source = replace(job.source, precision=compute.precision)
    options = replace(options, precision=job.source.precision)
    job.workload = clipped_by_stage(job.workload, flush.clip_stage_norm)
    shown, policy = plan_of_run(job, local, training, options, flush, compute)
    if ranks not in (None, len(shown.stage_graph.devices)):
        raise InvalidPlanError(
            f"the plan is for {len(shown.stage_graph.devices)} devices, but torchrun has started "
            f"{ranks} processes; start one per device"
        )
    is_first = torchrun.is_first()
    if is_first and local.plan_file and shown.predicted is not None and job.profile is None:
        remark_uncalibrated(shown)
    if local.plan_file is not None and local.device == "cpu" and not torchrun.is_rank():
        remark_crowded(shown)
    if is_first:
        say(shown.summary())
        say(glossary(shown))
        for sentence in loss_notes(job.captured.graph.loss_kind, job.captured.graph.normalised):
            say(sentence)
        if training.resume is not None:
            done, more = restarts.first_step(training), training.length
            say(f"goes on from {training.resume}, after step {done:,}, {more}")
        elif training.steps and training.epochs:
            say(f"trains {training.length}, whichever comes first")
    say_remarks()
    special: dict[str, Any] = {"accumulate": compute.accumulate}
    if is_async:
        special = {
            "policy": policy,
            "round_robin": flush.round_robin,
            "clip_stage_norm": flush.clip_stage_norm,
        }

    def plan_fewer(asked: training_settings.TrainingSettings, left: int) -> float:
        nonlocal shown, special
        assert job.plan is not None
        before = job.plan.stage_graph
        fewer = replace(local, plan_file=None, devices=left, batch_size=before.batch_size)
        # What a plan file has decided stays.
        named = flush.policy or (shown.policy or None if local.plan_file is not None else None)
        flush_as_before = replace(flush, mode="async" if is_async else "sync", policy=named)
        rows = compute.sparse_embeddings
        rows = job.plan.sparse_embeddings if rows is None else rows
        compute_as_before = replace(compute, sparse_embeddings=rows)
        job.plan, job.is_by_file = None, False
        shown, policy = plan_of_run(
            job, fewer, asked, options, flush_as_before, compute_as_before, again=True
        )
        special |= {"policy": policy} if is_async else {}
        if is_first:
            planned = len(before.devices)
            note(f"{left} of {planned} devices are left, for which training is planned anew")
        return predicted_s()

    def predicted_s() -> float:
        # None where the run differs from the plan, so that its prediction says nothing.
        return shown.predicted.step_s if shown.predicted is not None else 0.0

    def attempt(asked: training_settings.TrainingSettings) -> Run:
        assert job.plan is not None
        left = restarts.devices_left(job)
        is_again = torchrun.is_restarted() or asked is not training
        if is_again and left != len(job.plan.stage_graph.devices):
            plan_fewer(asked, left)
        begun = Run(
            shown,
            losses=(),
            step_s=(),
            ideal_step_s=0.0,
            policy=shown.policy,
            round_robin=shown.round_robin,
            chance=job.workload.chance,
            resumed=str(asked.resume or ""),
            first_step=restarts.first_step(asked),
        )
        so_far.begin(begun)
        return train_job(
            job,
            asked,
            fewer=partial(plan_fewer, asked),
            is_async=is_async,
            predicted_s=predicted_s(),
            on_interrupt=run_results.say_stopping,
            compute=options,
            so_far=so_far,
            **special,
        )

    def keep(result: Run) -> tuple[Run, Path]:
        from anabranch.record import new_folder

        folder, plan = run or new_folder(model.model, began), shown
        if result.plan_changes:
            job.plan = plan = result.plan
        # With replicas in turn, in-flight counts are not those of a plan.
        kept = None if result.round_robin else plan
        return run_results.keep_run(job, result, folder, kept), folder

    try:
        with run_results.keeping(keep, training.save) as so_far:
            result, training = restarts.train_with_restarts(attempt, training, note, run)
    except KeyboardInterrupt:
        run_results.say_stopped(training.save)
        raise typer.Exit(INTERRUPTED) from None
    if is_first:
        run_results.say_run(*keep(result), {"interrupted": result.interrupted})
    if result.interrupted:
        if is_first:
            note(run_results.how_to_go_on(result, training, run))
        raise typer.Exit(INTERRUPTED)


def _rehearse(
    model: training_settings.RunSettings,
    local: training_settings.TrainedPlanSettings,
    others: list[Any],
    steps: int | None,
    run: Path | None,
) -> None:
    """Do what ``rehearse`` does with a plan file; other options mean nothing there."""
    named = [name for settings in (local, *others) for name in options_set(settings)]
    if useless := [name for name in named if name not in ("--plan", "--steps")]:
        raise typer.BadParameter(f"{', '.join(useless)}: not with --emulate, nothing is trained")
    if local.plan_file is None:
        raise typer.BadParameter(
            "--emulate needs a plan (--plan FILE); anabranch rehearse plans for a --cluster as well"
        )
    planned = planned_in_file(local.plan_file, model.model, OtherModelSettings(output=model.output))
    emulate(*planned, LinkSettings(), steps or STEPS, run, model.model)


def _seeded(make: Callable[[], T], seed: int | None) -> T:
    """Call a function with a seed, if there is one, and leave that seed for the run."""
    import torch

    if seed is None:
        return make()
    torch.manual_seed(seed)
    made = make()
    torch.manual_seed(seed)  # the model's function may have set its own
    return made
