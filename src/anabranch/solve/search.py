"""The search for a plan: planners propose stage graphs, the simulator judges them.

Proposals are scheduled and simulated (``simulator.judge``); a plan's figures are the simulator's.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from anabranch.cluster import Cluster
from anabranch.cost import CostModel
from anabranch.planner.auto.planner import Auto
from anabranch.planner.toolkit.problem import Problem
from anabranch.plans.plan import Plan
from anabranch.profile.profile import Profile
from anabranch.solve import idle_devices
from anabranch.solve.asynchronous.search import AsynchronousSearch
from anabranch.solve.planner_options import check_arguments, planner_with, start_of
from anabranch.solve.policy_choice import check_mode
from anabranch.solve.rewriting import rewrite_notes
from anabranch.solve.schedule_choice import AUTO
from anabranch.solve.step_search import StepSearch
from anabranch.weights import OptimizerFacts, facts_named


@contextmanager
def _spare_older_objects() -> Iterator[None]:
    """Keep the garbage collector from objects made before, most of them by libraries; scanning them
    takes up to a fifth of a search.
    """
    if gc.get_freeze_count():  # the caller or a search around this one spares them already
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@_spare_older_objects()
def plan(
    profile: Profile,
    cluster: Cluster,
    batch_size: int,
    *,
    planner: str = "auto",
    microbatch_size: int | None = None,
    schedule: str = "auto",
    optimizer_factor: float | None = None,
    max_replicas: int | None = None,
    planner_options: Mapping[str, object] | None = None,
    model: str = "",
    improve: bool = True,
    mode: str = "sync",
    policy: str = "",
    optimizer: OptimizerFacts | str | None = None,
    shard_optimizer: bool | None = None,
    sparse_embeddings: bool = False,
    start: Plan | None = None,
) -> Plan:
    """Find the stage graph and schedule with the shortest simulated step; for asynchronous training
    with the shortest simulated time from one mini-batch to the next.

    An interrupt (Ctrl-C) ends the search; the plan is then the best one proposed so far, and its
    notes say so. Without any proposal the interrupt reaches the caller.

    Args:
        profile: seconds and bytes of the model's operators.
        cluster: devices, links and memory.
        batch_size: samples of one step, or of one mini-batch without a flush.
        planner: key of ``planner.PLANNERS``.
        microbatch_size: only this size; by default every power of two that the profile covers.
            Asynchronous mini-batches are one micro-batch, except for policies ``2bw`` and
            ``2bw-ef``.
        schedule: key of ``schedule.SCHEDULES``; ``auto``: for each proposal the faster of 1F1B with
            minimal and with deep warm-up, the minimal one if both are equal, and for the best
            proposals the schedule with split backwards that saves most, if it saves enough;
            ``published``: the schedule of the planner's paper.
        optimizer_factor: see ``CostModel``.
        max_replicas: most replicas of one stage.
        planner_options: values for fields of the planner.
        model: name of the model, for the plan's reader.
        improve: also try neighbours of the best proposals, if the planner can make them.
        mode: ``sync`` or ``async``.
        policy: for ``async`` a key of ``weights.POLICIES``, or ``auto`` (the same as none) for the
            one that ``weights.recommend`` names.
        optimizer: for ``async``, facts on which policies depend, if they are known, or a key of
            ``weights.OPTIMIZERS``, like ``nadam``: it decides what ``auto`` chooses, and how many
            copies of the weights a policy that predicts holds.
        shard_optimizer: whether replicas of a stage share its optimizer state, see ``Pipeline``; by
            default if nothing fits without, or a proposal takes less time with it. Not for
            ``async``.
        sparse_embeddings: whether embedding tables have sparse gradients, see ``ComputeOptions``,
            and an optimizer that takes them. Not for ``async``.
        start: a plan of this model to improve, perhaps made by hand: planner ``auto`` begins with
            it alone, and its result is no slower. Not for ``async``.

    Raises:
        InfeasiblePlanError: if nothing fits the devices.
        InvalidPlanError: if ``start`` does not suit model and cluster.
        PolicyError: if there is no such policy, or it cannot work with the optimizer.
        BudgetError: if the search would take more than its budget.
        ValueError: for an unknown name or a number below 1.
    """
    check_arguments(batch_size, planner, microbatch_size, schedule, max_replicas)
    check_mode(mode, policy, schedule)
    facts = facts_named(optimizer)
    search, ignored = planner_with(planner, max_replicas, planner_options or {})
    notes = rewrite_notes(profile.graph.rewrites)
    if ignored:
        notes.append(
            f"planner {planner} has no limit on replicas: --max-replicas {max_replicas} is ignored"
        )
    cost = CostModel(
        profile,
        cluster,
        optimizer_factor=optimizer_factor,
        shard_optimizer=bool(shard_optimizer),
        sparse_embeddings=sparse_embeddings,
        batch_size=batch_size if mode == "sync" else 0,
    )
    whole = Problem(cost, batch_size, microbatch_size, getattr(search, "max_replicas", None))
    begin = None
    if start is None:
        cost = replace(cost, cluster=idle_devices.usable_part(whole))
    else:
        begin = start_of(start, planner, batch_size, microbatch_size, mode)
    if mode == "async":
        if sparse_embeddings:
            raise ValueError("sparse_embeddings is for mode sync; without a flush, leave it out")
        if shard_optimizer:
            raise ValueError("shard_optimizer is for mode sync; without a flush, leave it out")
        asynchronous = AsynchronousSearch(
            cost, batch_size, microbatch_size, planner, search, improve, facts
        )
        return idle_devices.on_whole(asynchronous.plan(policy or "auto", model, notes), whole)
    schedules: tuple[str, ...] = (schedule,)
    if schedule in ("auto", "published"):
        schedules = AUTO if schedule == "auto" else search.schedules
    task = StepSearch(
        batch_size, planner, search, microbatch_size, schedules, improve, model, begin, notes
    )
    may_share = shard_optimizer is None and cluster.num_devices > 1
    search_on = partial(task.fitting, may_share=may_share)
    if begin is not None and (best := idle_devices.on_its_part(begin.devices, cost, search_on)):
        return best
    best = search_on(cost)
    may_idle = isinstance(search, Auto) and improve and begin is None
    # Processes on one machine are as many as the user wants.
    if may_idle and not (cluster.cores or best.interrupted):
        quick = replace(task, planner=idle_devices.with_less_effort(search))
        quick_on = partial(quick.fitting, may_share=may_share)
        best = idle_devices.with_fewer_devices(best, cost, quick_on, search_on)
    return idle_devices.on_whole(best, whole)
