"""The plan of a run, from a file or from a search, as it will be executed."""

from __future__ import annotations

from dataclasses import InitVar, dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from anabranch.cli.clusters import remark_crowded, remark_uncalibrated
from anabranch.cli.output import note, say, say_remarks
from anabranch.cli.torchrun import is_first, is_rank, on_first
from anabranch.cli.training import preflight
from anabranch.cli.training.job import Job
from anabranch.cli.training.restarts import first_step
from anabranch.cli.training.training_settings import (
    ComputeSettings,
    FlushSettings,
    TrainedPlanSettings,
    TrainingSettings,
)

if TYPE_CHECKING:
    from anabranch.plans.plan import Plan
    from anabranch.weights import WeightPolicy


@dataclass
class PlannedRun:
    """A job with the plan of its run, which is made anew where devices are lost.

    Attributes:
        shown: the plan as it will be executed.
        policy: weight policy in place of the plan's, or None.
    """

    job: Job
    local: TrainedPlanSettings
    training: InitVar[TrainingSettings]
    compute: ComputeSettings
    flush: FlushSettings
    shown: Plan = field(init=False)
    policy: WeightPolicy | str | None = None

    def __post_init__(self, training: TrainingSettings) -> None:
        self.is_async = self.flush.is_async(self.job.plan)
        precision = self.job.source.precision  # perhaps of the plan
        self.options = replace(self.compute.options(), precision=precision)
        self._plan(training)

    @property
    def predicted_s(self) -> float:
        """Seconds of a step; 0 where the run differs from the plan, whose prediction is no use."""
        return self.shown.predicted.step_s if self.shown.predicted is not None else 0.0

    @property
    def pipeline_options(self) -> dict[str, Any]:
        """Options of the pipeline, with a flush or without."""
        if not self.is_async:
            return {"compute": self.options, "accumulate": self.compute.accumulate}
        turns, norm = self.flush.round_robin, self.flush.clip_stage_norm
        own = {"policy": self.policy, "round_robin": turns, "clip_stage_norm": norm}
        return {"compute": self.options, **own}

    def say(self, training: TrainingSettings) -> None:
        """Print the plan, and what the user should know of it."""
        from anabranch.graph.loss_kinds import loss_notes
        from anabranch.schedule import glossary

        plan, graph = self.shown, self.job.captured.graph
        is_file = self.local.plan_file is not None
        if is_first() and is_file and plan.predicted is not None and self.job.profile is None:
            remark_uncalibrated(plan)
        if is_file and self.local.device == "cpu" and not is_rank():
            remark_crowded(plan)
        if is_first():
            say(plan.summary())
            say(glossary(plan))
            for sentence in loss_notes(graph.loss_kind, graph.normalised):
                say(sentence)
            if training.resume is not None:
                done, more = first_step(training), training.length
                say(f"goes on from {training.resume}, after step {done:,}, {more}")
            elif training.steps and training.epochs:
                say(f"trains {training.length}, whichever comes first")
        say_remarks()

    def plan_fewer(self, training: TrainingSettings, left: int) -> float:
        """Plan for the devices that are left, and make the programs; return ``predicted_s``."""
        from anabranch.runtime.plan_parts import prepare

        assert self.job.plan is not None
        before, named, rows = self.job.plan, self.flush.policy, self.compute.sparse_embeddings
        # What a plan file has decided stays.
        if self.local.plan_file is not None:
            named = named or self.shown.policy or None
        self.flush = replace(self.flush, mode="async" if self.is_async else "sync", policy=named)
        if rows is None:
            self.compute = replace(self.compute, sparse_embeddings=before.sparse_embeddings)
        size, planned = before.stage_graph.batch_size, len(before.stage_graph.devices)
        self.local = replace(self.local, plan_file=None, devices=left, batch_size=size)
        self.job.plan, self.job.is_by_file = None, False
        self._plan(training, again=True)
        how = self.job.workload, self.job.source.precision, self.job.device
        prepare(self.job.captured, self.shown.stage_graph, *how)
        if is_first():
            note(f"{left} of {planned} devices are left, for which training is planned anew")
        return self.predicted_s

    def _plan(self, training: TrainingSettings, *, again: bool = False) -> None:
        """Plan the job if it has no plan.

        Whatever cannot run is refused as early as possible; ``again``, data has been read before.
        """
        from anabranch import launch
        from anabranch.runtime.data_feed import require_first_batch
        from anabranch.runtime.state.optimizer_facts import require_recipe_updates

        job, local, is_async, options = self.job, self.local, self.is_async, self.options
        flush, compute = self.flush, self.compute
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
            require_recipe_updates(
                job.workload, job.captured.graph, sparse_embeddings=asks_for_rows
            )
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
        self.shown, self.policy = shown, policy
