"""The plan of a run, from a file or from a search, as it will be executed."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from anabranch.cli.torchrun import is_rank, on_first
from anabranch.cli.training import preflight
from anabranch.cli.training.job import Job
from anabranch.cli.training.training_settings import (
    ComputeSettings,
    FlushSettings,
    TrainedPlanSettings,
    TrainingSettings,
)

if TYPE_CHECKING:
    from anabranch.plans.plan import Plan
    from anabranch.runtime.compute.options import ComputeOptions
    from anabranch.weights import WeightPolicy


def plan_of_run(
    job: Job,
    local: TrainedPlanSettings,
    training: TrainingSettings,
    options: ComputeOptions,
    flush: FlushSettings,
    compute: ComputeSettings,
    *,
    again: bool = False,
) -> tuple[Plan, WeightPolicy | str | None]:
    """Plan the job if it has no plan; return the plan as it will be executed, and a policy in place
    of the plan's, or None.

    Whatever cannot run is refused as early as possible; ``again``, data has been read before.
    """
    from anabranch import launch
    from anabranch.runtime.data_feed import require_first_batch
    from anabranch.runtime.state.optimizer_facts import require_recipe_updates

    is_async = flush.is_async(job.plan)
    name = flush.policy or (job.plan.policy if job.plan is not None else "")
    known = flush.with_options(name) if is_async and name not in ("", "auto") else None
    preflight.require_trainable(
        job.workload,
        options,
        known,
        is_async=is_async,
        training=training,
        batch_size=job.batch_size(local),
    )
    metrics = job.captured.metrics  # ranks of torchrun capture at the same time
    if (saves := training.saves()) is not None:
        saves.require_metric(metrics)
    asks_for_rows = bool(compute.sparse_embeddings) and not is_async
    has_rows = job.plan is not None and job.plan.sparse_embeddings
    if asks_for_rows or not (has_rows or options.backend):  # compiled, gradients are dense
        require_recipe_updates(job.workload, job.captured.graph, sparse_embeddings=asks_for_rows)
    if job.plan is None and not (again or is_rank()):  # ranks of torchrun would read it at once
        # In a process of its own, as ranks must not share the files that reading opens.
        launch.run(require_first_batch, 1, job.captured, job.workload, job.batch_size(local))
    search = partial(
        job.search,
        local,
        max_replicas=local.max_replicas,
        tries_rewrites=not (is_async or again),
        mode="async" if is_async else "sync",
        policy=flush.policy or "",
        shard_optimizer=compute.shard_optimizer,
        sparse_embeddings=asks_for_rows,
    )
    is_file = job.plan is not None
    job.plan = job.plan or on_first(search)
    job.take_rewrites(job.plan)
    traits = "shard_optimizer", "sparse_embeddings", "precision"
    asked = {trait: getattr(compute, trait) for trait in traits}
    changed = replace(job.plan, **{trait: on for trait, on in asked.items() if on is not None})
    if changed != job.plan:
        job.plan = on_first(partial(job.predicted, changed))
    policy: WeightPolicy | str | None = None
    if is_async:
        # A plan of the search has the policy already, also where the search was to choose one.
        policy = flush.policy if is_file else None
        if flush.policy_option:
            policy = flush.with_options(policy or job.plan.policy)
    shown = preflight.executed_plan(
        job.plan,
        job.workload,
        policy,
        is_async=is_async,
        round_robin=flush.round_robin,
        checked=(job.captured, options) if is_file else None,
    )
    if shown.predicted is None and job.plan.predicted is not None:
        shown = on_first(partial(job.predicted, shown))
    return shown, policy
