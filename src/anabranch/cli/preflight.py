"""Checks before ``train`` captures, measures and plans, so that a refusal comes at once."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from anabranch.cli.training_settings import ComputeSettings, FlushSettings, TrainingSettings
from anabranch.cli.writable import why_not
from anabranch.cluster import Cluster
from anabranch.errors import DataError, InvalidPlanError, OutputError, TrainingError

if TYPE_CHECKING:
    from anabranch.plans.plan import Plan
    from anabranch.runtime.compute.options import ComputeOptions
    from anabranch.weights import WeightPolicy
    from anabranch.workload import Workload


def refuse_mode(
    is_async: bool, flush: FlushSettings, compute: ComputeSettings, training: TrainingSettings
) -> None:
    """Refuse options of the other mode."""
    if is_async and training.replan:
        raise typer.BadParameter(
            "--replan: not with --mode async, where versions of the weights are under way between "
            "any two mini-batches; train with a flush"
        )
    accumulate = compute.accumulate
    norm = flush.clip_stage_norm
    if not is_async and flush.round_robin:
        raise typer.BadParameter(
            "round-robin is for --mode async; in steps with a flush the replicas of a stage "
            "split every micro-batch"
        )
    if not is_async and (flush.policy or flush.policy_option):
        raise typer.BadParameter(
            "--policy and its options are for --mode async; without it all passes read the same "
            "weights"
        )
    if is_async and accumulate > 1:
        raise typer.BadParameter(
            f"accumulate = {accumulate}: not with --mode async, where every mini-batch makes an "
            "update; take a larger --batch-size"
        )
    if is_async and compute.shard_optimizer:
        raise typer.BadParameter(
            "--shard-optimizer: not with --mode async, where every replica makes its own versions "
            "of the weights; leave it out, or train with a flush"
        )
    if norm is None:
        return
    if not is_async:
        raise typer.BadParameter(
            f"clip-stage-norm = {norm:g} is for --mode async, where stages make their updates at "
            "different times; with a flush the norm is clipped over all stages: give the Workload "
            f"a clip_norm, clip_norm={norm:g}"
        )
    if not norm > 0:
        raise typer.BadParameter(f"clip-stage-norm = {norm:g}: a norm is more than 0")


def require_own_devices(plan: Plan, file: Path) -> None:
    """Accept a plan whose devices are those of its cluster, of which it may leave some out; any
    others would have no links. Raises InvalidPlanError naming them.
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


def require_trainable(
    workload: Workload,
    compute: ComputeOptions,
    policy: WeightPolicy | str | None,
    *,
    is_async: bool,
    training: TrainingSettings,
    batch_size: int,
) -> None:
    """Accept what can be trained as far as that is known without a plan.

    Raises:
        DataError: if there is nothing to train on, or to evaluate, or batches have another size.
        TrainingError: if the checkpoint to write exists already, or the one to read has all epochs.
        FileFormatError: if the one to read is none, or there are no weights to begin with.
        PolicyError: if policy, optimizer, clipping and precision do not go together.
    """
    from anabranch.checkpoint import Checkpoint
    from anabranch.checkpoint.plain import PlainWeights
    from anabranch.data.loaders import Loader
    from anabranch.training import require_place
    from anabranch.training.loop import nothing_left, require_evaluation

    if workload.data is None:
        raise DataError(
            "the workload has no data; give Workload a function data(batch_size, epoch) that "
            "yields batches"
        )
    if isinstance(workload.data, Loader):
        workload.data.require_batch_size(batch_size)
    resume, saves = training.resume, training.saves()
    require_place(training.save, resume, is_series=saves is not None)
    require_evaluation(workload, training.evaluate_every)
    training.loggers()
    if resume is not None:
        done = Checkpoint(resume).progress.epoch
        if training.epochs is not None and done >= training.epochs:
            raise nothing_left(resume, done, training.epochs)
    if training.weights is not None:
        PlainWeights(training.weights)
    if is_async:
        from anabranch.runtime.asynchronous.requirements import require_recipes

        require_recipes(workload, compute, policy)


def require_new_run(run: Path | None) -> None:
    """Accept a folder for figures and report, a new one in runs by default; raises TrainingError if
    an earlier run is in it, OutputError if it cannot be made.
    """
    folder = run or Path("runs")
    if why := why_not(folder):
        raise OutputError(
            f"the figures and the report of a run cannot be kept in {folder}: {why}; name "
            "another folder with --out"
        )
    if run is not None and (run / "run.json").exists():
        raise TrainingError(
            f"{run} has the figures of an earlier run (run.json), which are never written over; "
            "name a new folder with --out, or leave --out away: then every run gets a folder of "
            "its own in runs"
        )
