"""Simulation of any plan: its timeline and figures, and the step that its schedule allows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from anabranch.cluster import Cluster
from anabranch.cost import CostModel
from anabranch.errors import InvalidPlanError
from anabranch.graph.opgraph import OpGraph
from anabranch.plans.edges import EVERY_EDGE, message_edges
from anabranch.plans.plan import Plan, Prediction
from anabranch.plans.prices import bottleneck_s_per_sample, prices_of
from anabranch.plans.stages import StageGraph
from anabranch.profile.profile import Profile
from anabranch.schedule import compute_order, rule_named
from anabranch.schedule.asynchronous import split_batches
from anabranch.simulator import stream
from anabranch.simulator.costs import ModelCosts, StageTimes
from anabranch.simulator.run import run, step_seconds
from anabranch.solve.asynchronous.simulation import simulate_async
from anabranch.solve.bound import step_bound
from anabranch.solve.policy_choice import check_mode
from anabranch.solve.schedule_choice import scheduled
from anabranch.timeline import Timeline


def simulate(
    plan_: Plan,
    profile: Profile,
    cluster: Cluster,
    *,
    schedule: str | None = None,
    optimizer_factor: float | None = None,
    sparse_embeddings: bool | None = None,
) -> Timeline:
    """Predict the timeline of one step of a plan.

    The timeline of an asynchronous plan shows some mini-batches from an empty pipeline to an empty
    one; ``simulate_async`` says more about it.

    Args:
        plan_: any plan for the profile's model.
        profile: seconds and bytes of the model's operators.
        cluster: cluster on which the plan shall run, not necessarily the one it was made for.
        schedule: another schedule than the plan's, with that schedule's own in-flight counts;
            ``auto`` for the fastest that ``plan`` chooses from, ``published`` for the fastest of
            the planner's paper.
        optimizer_factor: see ``CostModel``.
        sparse_embeddings: as for ``plan``; by default as the plan says.

    Raises:
        InvalidPlanError: if the plan does not suit model and cluster; the message lists every
            problem.
        InvalidScheduleError: if its in-flight counts cannot be scheduled.
    """
    if plan_.mode == "async":
        check_mode("async", plan_.policy, schedule or "auto")
        return simulate_async(plan_, profile, cluster, optimizer_factor=optimizer_factor).timeline
    if sparse_embeddings is not None:
        plan_ = replace(plan_, sparse_embeddings=sparse_embeddings)
    cost = prices_of(plan_, profile, cluster, optimizer_factor=optimizer_factor)
    return checked_run(*scheduled(plan_, cost, schedule), cost)


def foreseen(
    plan_: Plan, profile: Profile, cluster: Cluster | None = None, *, schedule: str | None = None
) -> tuple[Plan, Timeline]:
    """Return the plan with its figures on a cluster, by default its own, and the timeline.

    Args:
        schedule: another schedule, as for ``simulate``, which the plan then has.

    Raises:
        InvalidPlanError: if the plan does not suit model and cluster, or has no cluster.
    """
    machines = cluster or plan_.machines
    if machines is None:
        raise InvalidPlanError(
            f"the plan was made for a cluster called {plan_.cluster!r}, but does not say what that "
            "has; name the cluster that it is to run on"
        )
    if schedule is not None:
        graph, name = scheduled(plan_, prices_of(plan_, profile, machines), schedule)
        plan_ = replace(plan_, stage_graph=graph, schedule=name)
    predicted = simulate(plan_, profile, machines)
    costs = prices_of(plan_, profile, machines)
    figures = figures_of(predicted, plan_.stage_graph, costs, plan_.mode)
    return plan_.predicting(figures, machines), predicted


def figures_of(
    timeline: Timeline, graph: StageGraph, cost: CostModel, mode: str = "sync"
) -> Prediction:
    several = graph.shares_devices
    return Prediction(
        step_s=timeline.step_s,
        bottleneck_s_per_sample=bottleneck_s_per_sample(graph, cost),
        bubble=timeline.bubble,
        device_peak_bytes=tuple(timeline.peak_bytes[device] for device in timeline.devices),
        period_s=timeline.period_s,
        exposed_sums=timeline.exposed_sums,
        bound_s=step_bound(cost, graph.batch_size, several=several) if mode == "sync" else None,
    )


def checked_run(
    graph: StageGraph,
    schedule: str,
    cost: CostModel,
    slower: Mapping[int, float] | None = None,
    *,
    messages: bool = True,
) -> Timeline:
    """Check a schedule, then simulate one step; see ``ModelCosts`` and ``run`` for the options."""
    costs = ModelCosts(graph, cost, slower=slower or {})
    order = compute_order(graph, schedule)
    return run(graph, order, costs, period=True, messages=messages)


def ideal_step_s(
    plan_: Plan,
    forward_s: Sequence[Mapping[int, float]],
    backward_s: Sequence[Mapping[int, float]],
    *,
    model: OpGraph | None = None,
) -> float:
    """Return the seconds of a step whose links cost nothing, as the schedule allows for these stage
    times; for an asynchronous plan, seconds per mini-batch once the pipeline is full.

    Args:
        plan_: stages and schedule.
        forward_s: per stage, {samples of one device's slice: seconds of a forward}.
        backward_s: the same for a backward.
        model: distinguishes stage edges that carry values or gradients from edges that only order
            stages; by default all carry both.
    """
    graph = plan_.stage_graph
    edges = message_edges(graph, model) if model is not None else EVERY_EDGE
    times = StageTimes(forward_s, backward_s, edges)
    if plan_.mode == "async":
        return stream.steady(split_batches(graph), times).period_s
    return step_seconds(graph, compute_order(graph, plan_.schedule), times)


def synchronous(plan_: Plan) -> Plan:
    """Return a plan of the same stages with a flush after every batch; a synchronous plan as is."""
    if plan_.mode == "sync":
        return plan_
    graph = rule_named(plan_.schedule).warm_up(plan_.stage_graph)
    return replace(plan_, stage_graph=graph, mode="sync", policy="", round_robin=False)
