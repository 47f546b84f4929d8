"""Simulation of any plan without a flush: its timeline and figures, and the age of its weights."""

from __future__ import annotations

from dataclasses import dataclass, replace

from anabranch.cluster import Cluster
from anabranch.cost import CostModel
from anabranch.errors import InvalidPlanError
from anabranch.plans.check import require, require_few, require_one_stage_each
from anabranch.plans.plan import Plan, Prediction
from anabranch.plans.prices import bottleneck_s_per_sample
from anabranch.plans.stages import StageGraph
from anabranch.profile.profile import Profile
from anabranch.schedule import asynchronous
from anabranch.simulator import stream
from anabranch.simulator.costs import ModelCosts
from anabranch.simulator.staleness import Staleness, staleness
from anabranch.solve.policy_choice import check_mode, recommended
from anabranch.timeline import Timeline
from anabranch.weights import (
    OptimizerFacts,
    WeightPolicy,
    may_take_turns,
    policy_named,
    require_fits,
    require_optimizer,
)


@dataclass(frozen=True)
class Simulated:
    """Prediction of an asynchronous plan.

    Attributes:
        plan: the plan as simulated, with its policy and figures.
        staleness: age and versions of the weights of each stage.
        timeline: mini-batches from an empty pipeline to an empty one.
        graph: stages with the mini-batches of the timeline as one batch.
    """

    plan: Plan
    steady: stream.Steady
    staleness: tuple[Staleness, ...]
    timeline: Timeline
    graph: StageGraph


def simulate_async(
    plan_: Plan,
    profile: Profile,
    cluster: Cluster,
    *,
    policy: str = "",
    optimizer_factor: float | None = None,
    optimizer: OptimizerFacts | None = None,
) -> Simulated:
    """Predict a plan without a flush.

    Args:
        plan_: any plan for the profile's model. A synchronous one keeps its stages; each mini-batch
            becomes one micro-batch, unless the policy updates after several.
        profile: seconds and bytes of the model's operators.
        cluster: cluster on which the plan shall run.
        policy: another policy than the plan's; for ``auto``, or empty where the plan has none, the
            one that ``weights.recommend`` names.
        optimizer_factor: see ``CostModel``.
        optimizer: facts on which policies depend, if they are known.

    Raises:
        InvalidPlanError: if the plan does not suit model and cluster, or cannot run without a
            flush.
        PolicyError: if there is no such policy, or it is not defined for such a plan or optimizer.
    """
    check_mode("async", policy)
    require_few(plan_.stage_graph)
    require_asynchronous(plan_, policy)
    cost = CostModel(profile, cluster, optimizer_factor=optimizer_factor)
    name = policy or plan_.policy or "auto"
    if name == "auto":
        whole = _converted(plan_, policy_named("naive"))
        require(whole, cost, idle=True)
        may_cut = plan_.stage_graph.num_microbatches(0) >= whole.depth
        name = recommended(whole, cost, optimizer, may_cut=may_cut)[0]
    graph = _converted(plan_, policy_named(name))
    order = order_of(plan_, graph, policy_named(name))
    ages = ages_of(order, name, optimizer)
    versions = tuple(age.versions for age in ages)
    require(order.graph, cost, versions, idle=True)
    costs = ModelCosts(order.graph, cost, versions)
    steady, timeline = stream.steady(order, costs), stream.record(order, costs)
    shown = replace(
        plan_,
        stage_graph=graph,
        schedule=asynchronous.ORDER,
        mode="async",
        policy=name,
        round_robin=order.round_robin,
        shard_optimizer=False,
        sparse_embeddings=False,
        profile=profile.origin,
    ).predicting(prediction(steady, graph, cost), cluster)
    whole = asynchronous.repeated(order.graph, stream.shown(order.graph))
    return Simulated(shown, steady, ages, timeline, whole)


def prediction(steady: stream.Steady, graph: StageGraph, cost: CostModel) -> Prediction:
    """Return the figures of training once the pipeline is full."""
    bottleneck_s = bottleneck_s_per_sample(graph, cost)
    return Prediction(steady.period_s, bottleneck_s, steady.bubble, steady.device_peak_bytes)


def order_of(
    plan_: Plan, graph: StageGraph, policy: WeightPolicy
) -> asynchronous.AsynchronousOrder:
    """Return the order of mini-batches. Replicas take them in turn if the plan says so and the
    policy allows it; otherwise they split each mini-batch.
    """
    if plan_.round_robin and may_take_turns(graph, policy):
        return asynchronous.round_robin(graph)
    return asynchronous.split_batches(graph)


def ages_of(
    order: asynchronous.AsynchronousOrder, policy: str, optimizer: OptimizerFacts | None
) -> tuple[Staleness, ...]:
    """Return the age of the weights of each stage."""
    rule = policy_named(policy)
    if optimizer is not None:
        require_optimizer(rule, optimizer)
    last_update = optimizer is not None and optimizer.keeps_last_update
    return staleness(order, rule, last_update=last_update)


def require_asynchronous(plan_: Plan, policy: str = "") -> None:
    """Refuse a plan that cannot run without a flush. A synchronous one, which is converted, only
    needs one stage per device.

    Raises:
        InvalidPlanError: if a device has several stages, or an asynchronous plan has another
            schedule, micro-batches of several sizes, or groups of them.
        PolicyError: if its own policy does not exist or does not go with its micro-batches.
    """
    require_one_stage_each(plan_.stage_graph)
    if plan_.mode == "sync":
        return
    try:
        check_mode(plan_.mode, plan_.policy, plan_.schedule)
    except ValueError as error:
        raise InvalidPlanError(str(error)) from None
    graph = asynchronous.warm_up(plan_.stage_graph)
    if policy in ("", plan_.policy):
        rule = policy_named(plan_.policy)
        require_fits(rule, graph, microbatches=graph.num_microbatches(0))


def _converted(plan_: Plan, policy: WeightPolicy) -> StageGraph:
    """Return the stages of a plan as they run without a flush."""
    graph = plan_.stage_graph
    if plan_.mode == "async" and graph.num_microbatches(0) == 1 and not policy.microbatches:
        return graph
    if not policy.microbatches:
        size = graph.batch_size
        stages = (replace(stage, microbatch_size=size, k=1) for stage in graph.stages)
        graph = replace(graph, stages=tuple(stages))
    return asynchronous.warm_up(graph)
