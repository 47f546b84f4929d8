"""The plan as a run executes it, which ``train`` says before it begins.

Under another policy, mode or order of replicas the prediction of a plan file does not hold.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from anabranch.graph.capture import Captured
    from anabranch.plans.plan import Plan
    from anabranch.plans.stages import StageGraph
    from anabranch.runtime.compute.options import ComputeOptions
    from anabranch.weights import WeightPolicy
    from anabranch.workload import Workload


def executed_plan(
    plan: Plan,
    workload: Workload,
    policy: WeightPolicy | str | None = None,
    *,
    is_async: bool,
    round_robin: bool = False,
    checked: tuple[Captured, ComputeOptions] | None = None,
) -> Plan:
    """The plan with what a run makes of it; without a prediction where that is for another run.

    Args:
        plan: as it was given.
        workload: its optimizer decides on a policy where nobody has.
        policy: that the user asks for, perhaps ``auto``; by default the plan's.
        checked: with them the plan of a file is refused at once if ranks would refuse it.

    Raises:
        InvalidPlanError: if the plan does not cut the model, or cannot run in that mode.
        InvalidScheduleError: if its in-flight counts rise along a stage edge.
        PolicyError: if the policy is not defined for such a plan or optimizer.
    """
    from anabranch.runtime.asynchronous import requirements
    from anabranch.runtime.plan_parts import parts_of
    from anabranch.solve import require_asynchronous

    if checked is not None and is_async:
        require_asynchronous(plan, policy if isinstance(policy, str) else "")
    graph = requirements.asynchronous_stages(plan) if is_async else plan.stage_graph
    parts = None if checked is None else parts_of(checked[0], plan, exact=False)
    if not is_async:
        return plan if plan.mode == "sync" else _flushed(plan)
    order = requirements.order_of(plan, graph, round_robin=round_robin)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # told where training begins
        chosen, reason = requirements.choose(policy, plan, order.per_update, workload)
        if checked is not None and parts is not None:
            requirements.require_asynchronous(graph, order, parts, chosen, workload, checked[1])
    policy_note = f"policy {chosen.name}: {reason}"
    is_planned = plan.mode == "async" and chosen.name == plan.policy
    # Another optimizer has another reason, and other copies.
    is_planned = is_planned and (not reason or policy_note in plan.notes)
    if is_planned and not order.round_robin:
        return plan
    # Of a plan that has a policy the notes may have the reason.
    notes = plan.notes if is_planned else _without_policy(plan)
    if reason:
        notes = (policy_note, *notes)
    held = tuple(stage.in_flight for stage in graph.stages)
    if order.round_robin:
        held = order.in_flight
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
