"""Any plan as it runs without a flush: its figures, its timeline, and whether it is valid."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from anabranch.cluster import Cluster
from anabranch.cost import CostModel
from anabranch.errors import (
    DeadlockError,
    InvalidPlanError,
    InvalidScheduleError,
    PolicyError,
)
from anabranch.planner_options import bottleneck_s_per_sample
from anabranch.plans.check import check as check_stages
from anabranch.plans.edges import EVERY_EDGE, message_edges
from anabranch.plans.plan import Plan, Prediction
from anabranch.plans.stages import StageGraph
from anabranch.profile.profile import Profile
from anabranch.schedule import endless, schedule_of
from anabranch.schedule.kfkb import KFKB
from anabranch.simulator import stream
from anabranch.simulator.costs import ModelCosts
from anabranch.simulator.staleness import Staleness, staleness, versions_of
from anabranch.solve_async.modes import SCHEDULE, check_mode, recommended
from anabranch.timeline import Timeline
from anabranch.weights import (
    OptimizerFacts,
    WeightPolicy,
    policy_named,
    require_fits,
    require_optimizer,
)


@dataclass(frozen=True)
class Simulated:
    """What the simulator says about an asynchronous plan.

    Attributes:
        plan: as simulated, with its policy and figures.
        steady: training once the pipeline is full.
        staleness: per stage, how old its weights are.
        timeline: from an empty pipeline to an empty one.
        graph: the stages with all mini-batches of the timeline in a row.
    """

    plan: Plan
    steady: stream.Steady
    staleness: tuple[Staleness, ...]
    timeline: Timeline
    graph: StageGraph


def simulate(
    plan_: Plan,
    profile: Profile,
    cluster: Cluster,
    *,
    policy: str = "",
    optimizer_factor: float = 2.0,
    optimizer: OptimizerFacts | None = None,
) -> Simulated:
    """Predict a plan without a flush.

    Args:
        plan_: any plan for the profile's model. Of a synchronous one the stages are taken; each
            mini-batch becomes one micro-batch, unless the policy updates after several.
        profile: seconds and bytes of the model's operators.
        cluster: where it shall run.
        policy: another one than the plan's; ``auto`` or, where the plan has none, empty for what
            ``weights.recommend`` says.
        optimizer_factor: optimizer state in bytes per byte of trainable parameter.
        optimizer: what policies have to know of it, if anything is known.

    Raises:
        InvalidPlanError: if the plan does not suit model and cluster, or cannot run without a
            flush.
        PolicyError: if there is no such policy, or it is not defined for such a plan or optimizer.
    """
    check_mode("async", policy)
    require_asynchronous(plan_, policy)
    cost = CostModel(profile, cluster, optimizer_factor=optimizer_factor)
    name = policy or plan_.policy or "auto"
    if name == "auto":
        whole = _converted(plan_, policy_named("naive"))
        _require(whole, cost)
        may_cut = plan_.stage_graph.num_microbatches(0) >= whole.depth
        name = recommended(whole, cost, optimizer, may_cut=may_cut)[0]
    rule = policy_named(name)
    if optimizer is not None:
        require_optimizer(rule, optimizer)
    graph = _converted(plan_, rule)
    ages = staleness(graph, rule, last_update=_keeps_last_update(optimizer))
    versions = tuple(each.versions for each in ages)
    _require(graph, cost, versions)
    costs = ModelCosts(graph, cost, versions)
    steady = stream.steady(graph, costs, slots=cost.receive_slots)
    timeline = stream.record(graph, costs, slots=cost.receive_slots)
    predicted = Prediction(
        steady.period_s,
        bottleneck_s_per_sample(graph, cost),
        steady.bubble,
        steady.device_peak_bytes,
    )
    shown = replace(
        plan_,
        stage_graph=graph,
        schedule=SCHEDULE,
        mode="async",
        policy=name,
        predicted=predicted,
        profile=profile.origin,
        cluster=cluster.name,
        machines=cluster,
    )
    return Simulated(shown, steady, ages, timeline, endless.repeated(graph, stream.shown(graph)))


def require_asynchronous(plan_: Plan, policy: str = "") -> None:
    """Accept a plan by itself; of a synchronous one, which is converted, nothing is asked.

    Args:
        plan_: any plan.
        policy: another one than the plan's.

    Raises:
        InvalidPlanError: if an asynchronous plan has another schedule, micro-batches of several
            sizes, or groups of them.
        PolicyError: if its own policy does not exist or go with its micro-batches.
    """
    if plan_.mode == "sync":
        return
    try:
        check_mode(plan_.mode, plan_.policy, plan_.schedule)
    except ValueError as error:
        raise InvalidPlanError(str(error)) from None
    graph = endless.warm_up(plan_.stage_graph)
    if policy in ("", plan_.policy):
        rule = policy_named(plan_.policy)
        require_fits(rule, graph, microbatches=graph.num_microbatches(0))


def _require(graph: StageGraph, cost: CostModel, versions: Sequence[int] = ()) -> None:
    problems = check_stages(graph, cost, versions, idle=True)
    if problems:
        raise InvalidPlanError(
            f"the plan does not suit {cost.cluster.name}, or not this model: {'; '.join(problems)}"
        )


def synchronous(plan_: Plan) -> Plan:
    """The same stages with a flush after every batch; a synchronous plan as it is."""
    if plan_.mode == "sync":
        return plan_
    graph = KFKB().warm_up(plan_.stage_graph)
    return replace(plan_, stage_graph=graph, mode="sync", policy="")


def _converted(plan_: Plan, policy: WeightPolicy) -> StageGraph:
    """The stages of a plan as they run without a flush."""
    graph = plan_.stage_graph
    if plan_.mode == "async" and graph.num_microbatches(0) == 1 and not policy.microbatches:
        return graph
    if not policy.microbatches:
        size = graph.batch_size
        stages = (replace(stage, microbatch_size=size, k=1) for stage in graph.stages)
        graph = replace(graph, stages=tuple(stages))
    return endless.warm_up(graph)


def check_plan(
    plan_: Plan,
    profile: Profile | None = None,
    cluster: Cluster | None = None,
    optimizer: OptimizerFacts | None = None,
) -> list[str]:
    """What is wrong with an asynchronous plan, one line each; see ``solve.check_plan``."""
    graph = plan_.stage_graph
    try:
        require_asynchronous(plan_)
        rule = policy_named(plan_.policy)
        if optimizer is not None:
            require_optimizer(rule, optimizer)
        versions = versions_of(graph, rule, last_update=_keeps_last_update(optimizer))
    except (InvalidPlanError, PolicyError, ValueError) as error:
        return [str(error)]
    problems: list[str] = []
    edges = EVERY_EDGE
    if profile is not None and cluster is not None:
        cost = CostModel(profile, cluster)
        problems = check_stages(graph, cost, versions, idle=True)
        if not problems:
            edges = message_edges(graph, profile.graph)
            try:
                stream.sums(ModelCosts(graph, cost))
            except InvalidPlanError as error:
                problems.append(str(error))
    try:
        schedule_of(endless.repeated(graph, stream.shown(graph)), endless.ENDLESS, edges)
    except (InvalidScheduleError, DeadlockError, ValueError) as error:
        problems.append(str(error))
    return problems


def _keeps_last_update(optimizer: OptimizerFacts | None) -> bool:
    return optimizer is not None and optimizer.keeps_last_update
