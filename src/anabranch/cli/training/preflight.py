"""Checks before ``train`` captures, measures and plans, so that a refusal comes at once.

``executed_plan`` returns the plan to show before training begins.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from anabranch.cli.output import note, why_not
from anabranch.cli.training.training_settings import (
    SPARE_COPIES,
    ComputeSettings,
    FlushSettings,
    TrainingSettings,
)
from anabranch.errors import DataError, OutputError, TrainingError
from anabranch.plans.in_flight import with_in_flight

if TYPE_CHECKING:
    from anabranch.graph.capture import Captured
    from anabranch.plans.plan import Plan
    from anabranch.runtime.compute.options import ComputeOptions
    from anabranch.weights import WeightPolicy
    from anabranch.workload import Workload


def refuse_mode(
    is_async: bool, flush: FlushSettings, compute: ComputeSettings, training: TrainingSettings
) -> None:
    """Refuse options that do not go with the mode, or with each other."""
    accumulate, norm = compute.accumulate, flush.clip_stage_norm
    refused = {
        "--replan: not with --mode async, where versions of the weights are under way between any "
        "two mini-batches; train with a flush": is_async and training.replan,
        "--survive: not with --mode async, where mini-batches are under way at any time, so no "
        "copies of all ranks are of one step; train with a flush, or with --save-every and "
        "--max-restarts": is_async and training.survive,
        "--survive and --replan: take one of them": training.survive and training.replan,
        "--spare-copies and --no-replace: only with --survive": not training.survive
        and (training.spare_copies != SPARE_COPIES or not training.replace),
        "round-robin is for --mode async; in steps with a flush the replicas of a stage split "
        "every micro-batch": not is_async and flush.round_robin,
        "--policy and its options are for --mode async; without it all passes read the same "
        "weights": not is_async and (flush.policy or flush.policy_option),
        f"accumulate = {accumulate}: not with --mode async, where every mini-batch makes an "
        "update; take a larger --batch-size": is_async and accumulate > 1,
        "--shard-optimizer: not with --mode async, where every replica makes its own versions of "
        "the weights; leave it out, or train with a flush": is_async and compute.shard_optimizer,
        f"clip-stage-norm = {norm} is for --mode async, where stages make their updates at "
        "different times; with a flush the norm is clipped over all stages: give the Workload a "
        f"clip_norm, clip_norm={norm}": not is_async and norm is not None,
        f"clip-stage-norm = {norm}: a norm is more than 0": norm is not None and not norm > 0,
    }
    for why, holds in refused.items():
        if holds:
            raise typer.BadParameter(why)


def require_possible(training: TrainingSettings) -> None:
    """Accept settings of a run as far as they can be judged without the model."""
    from anabranch.checkpoint import Checkpoint
    from anabranch.training import require_place
    from anabranch.training.training_run import nothing_left

    resume = training.resume
    require_place(training.save, resume, is_series=training.saves() is not None)
    training.loggers()
    if resume is not None:
        done = Checkpoint(resume).progress.epoch
        if training.epochs is not None and done >= training.epochs:
            raise nothing_left(resume, done)


def require_trainable(
    workload: Workload,
    compute: ComputeOptions,
    policy: WeightPolicy | str | None,
    *,
    is_async: bool,
    training: TrainingSettings,
    batch_size: int,
) -> None:
    """Accept data, optimizer, scheduler, checkpoint or weights and, without a flush, the policy, as
    far as they can be judged without a plan.
    """
    from anabranch.checkpoint import Checkpoint
    from anabranch.data.loaders import Loader
    from anabranch.runtime.state.model_state import require_weights
    from anabranch.runtime.state.optimizer_facts import refuse_unsupported
    from anabranch.training.training_run import require_evaluation
    from anabranch.workload import stand_in_optimizer

    if workload.data is None:
        raise DataError(
            "the workload has no data; give Workload a function data(batch_size, epoch) that "
            "yields batches"
        )
    if isinstance(workload.data, Loader):
        workload.data.require_batch_size(batch_size)
        if workload.data.is_short_of(batch_size):
            note(
                f"the data has fewer samples than a batch of {batch_size}, for which plan and "
                "prediction are: every batch is a short one; take a smaller --batch-size"
            )
    require_evaluation(workload, training.evaluate_every, training.steps)
    if (optimizer := stand_in_optimizer(workload)) is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # ranks warn when training begins
            refuse_unsupported(optimizer, workload.make_scheduler(optimizer))
    if training.resume is not None:
        Checkpoint(training.resume).require_module(workload.module)
    if training.weights is not None:
        require_weights(training.weights, workload.module)
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


def executed_plan(
    plan: Plan,
    workload: Workload,
    policy: WeightPolicy | str | None = None,
    *,
    is_async: bool,
    round_robin: bool | None = None,
    checked: tuple[Captured, ComputeOptions] | None = None,
) -> Plan:
    """Return the plan as a run executes it, unpredicted under another policy, mode or turns.

    Args:
        plan: plan of the file or of the search.
        workload: its optimizer decides on the policy if neither user nor plan does.
        policy: policy that the user asks for, perhaps ``auto``; by default the plan's.
        checked: given for a plan of a file, which is refused here if ranks would refuse it.
    """
    from anabranch.runtime.asynchronous import requirements
    from anabranch.runtime.plan_parts import parts_of
    from anabranch.solve import require_asynchronous, synchronous

    if checked is not None and is_async:
        require_asynchronous(plan, policy if isinstance(policy, str) else "")
    graph = requirements.asynchronous_stages(plan) if is_async else plan.stage_graph
    parts = None if checked is None else parts_of(checked[0], plan, exact=False)
    if not is_async:
        if plan.mode == "sync":
            return plan
        return replace(synchronous(plan), predicted=None, notes=_without_policy(plan))
    order = requirements.order_of(plan, graph, in_turns=round_robin)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # ranks warn when training begins
        chosen, reason = requirements.choose(policy, plan, order.per_update, workload)
        if checked is not None and parts is not None:
            requirements.require_asynchronous(graph, order, parts, chosen, workload, checked[1])
    policy_note = f"policy {chosen.name}: {reason}"
    is_planned = plan.mode == "async" and chosen.name == plan.policy
    # Another optimizer has another reason, and other copies.
    is_planned = is_planned and (not reason or policy_note in plan.notes)
    if is_planned and order.round_robin == plan.round_robin:
        return plan
    # The notes of a plan with a policy may have the reason for it.
    notes = plan.notes if is_planned else _without_policy(plan)
    if reason:
        notes = (policy_note, *notes)
    if order.round_robin:
        graph = with_in_flight(graph, order.in_flight)
        notes = (*notes, "in flight is of each replica, in rounds of mini-batches")
    return replace(
        plan,
        stage_graph=graph,
        mode="async",
        policy=chosen.name,
        round_robin=order.round_robin,
        shard_optimizer=False,
        sparse_embeddings=False,
        predicted=None,
        notes=notes,
    )


def _without_policy(plan: Plan) -> tuple[str, ...]:
    return tuple(note for note in plan.notes if not note.startswith("policy "))
