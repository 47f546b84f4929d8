"""The plan as a run executes it, which ``train`` says before it begins.

Under another policy, mode or order of replicas the prediction of a plan file does not hold.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from anabranch.plans.plan import Plan
    from anabranch.plans.stages import StageGraph
    from anabranch.weights import WeightPolicy
    from anabranch.workload import Workload


def executed_plan(
    plan: Plan,
    workload: Workload,
    policy: WeightPolicy | str | None = None,
    *,
    is_async: bool,
    round_robin: bool = False,
) -> Plan:
    """The plan with what a run makes of it; without a prediction where that is for another run.

    Args:
        plan: as it was given.
        workload: its optimizer decides on a policy where nobody has.
        policy: that the user asks for, perhaps ``auto``; by default the plan's.

    Raises:
        InvalidPlanError, InvalidScheduleError, PolicyError: see ``AsyncPipeline``.
    """
    if not is_async:
        return plan if plan.mode == "sync" else _flushed(plan)
    from anabranch.runtime.asynchronous.requirements import (
        asynchronous_stages,
        choose,
        num_microbatches,
        round_robin_of,
    )

    graph = asynchronous_stages(plan)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # told where training begins
        chosen, reason = choose(policy, plan, num_microbatches(graph), workload)
    rounds = round_robin_of(plan) if round_robin else None
    policy_note = f"policy {chosen.name}: {reason}"
    is_planned = plan.mode == "async" and chosen.name == plan.policy
    # Another optimizer has another reason, and other copies.
    is_planned = is_planned and (not reason or policy_note in plan.notes)
    if is_planned and rounds is None:
        return plan
    # Of a plan that has a policy the notes may have the reason.
    notes = plan.notes if is_planned else _without_policy(plan)
    if reason:
        notes = (policy_note, *notes)
    held = tuple(stage.in_flight for stage in graph.stages)
    if rounds is not None:
        held = rounds.in_flight
        notes = (
            *notes,
            "replicas of a stage take mini-batches in turn; in flight is of each of them",
        )
    return replace(
        plan,
        stage_graph=_holding(graph, held),
        mode="async",
        policy=chosen.name,
        shard_optimizer=False,
        sparse_embeddings=False,
        predicted=None,
        notes=notes,
    )


def _flushed(plan: Plan) -> Plan:
    """An asynchronous plan in steps with a flush, whose batch has an end."""
    graph = plan.stage_graph
    held = tuple(min(s.in_flight, graph.num_microbatches(i)) for i, s in enumerate(graph.stages))
    return replace(
        plan,
        stage_graph=_holding(graph, held),
        mode="sync",
        policy="",
        predicted=None,
        notes=_without_policy(plan),
    )


def _holding(graph: StageGraph, held: tuple[int, ...]) -> StageGraph:
    pairs = zip(graph.stages, held, strict=True)
    return replace(graph, stages=tuple(replace(stage, in_flight=n) for stage, n in pairs))


def _without_policy(plan: Plan) -> tuple[str, ...]:
    return tuple(note for note in plan.notes if not note.startswith("policy "))
