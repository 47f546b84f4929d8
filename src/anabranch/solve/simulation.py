"""Simulation of any plan, with a flush or without: its timeline, its figures, and its faults."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import anabranch.planner as planners
from anabranch.cluster import Cluster
from anabranch.cost import CostModel
from anabranch.errors import (
    InvalidPlanError,
    InvalidScheduleError,
    PolicyError,
)
from anabranch.graph.opgraph import OpGraph
from anabranch.plans.check import check as check_stages
from anabranch.plans.check import too_many_microbatches, unfit_sizes
from anabranch.plans.edges import EVERY_EDGE, message_edges
from anabranch.plans.plan import Plan, Prediction
from anabranch.plans.prices import prices_of
from anabranch.plans.stages import StageGraph
from anabranch.profile.profile import Profile
from anabranch.schedule import (
    LISTS,
    asynchronous,
    checked_order,
    compute_order,
    rule_named,
    schedule_of,
)
from anabranch.simulator import stream
from anabranch.simulator.costs import ModelCosts, StageTimes
from anabranch.simulator.judge import Judge
from anabranch.simulator.objective import ShortestStep
from anabranch.simulator.pass_lengths import with_lengths
from anabranch.simulator.run import run, step_seconds
from anabranch.simulator.staleness import Staleness, staleness
from anabranch.solve.bound import step_bound
from anabranch.solve.policy_choice import check_mode, recommended
from anabranch.solve.splitting import AUTO, split_backwards
from anabranch.timeline import Timeline
from anabranch.weights import (
    OptimizerFacts,
    WeightPolicy,
    may_take_turns,
    policy_named,
    require_fits,
    require_optimizer,
)


def simulate(
    plan_: Plan,
    profile: Profile,
    cluster: Cluster,
    *,
    schedule: str | None = None,
    optimizer_factor: float = 2.0,
    sparse_embeddings: bool | None = None,
) -> Timeline:
    """Predict the timeline of one step of a plan.

    Of an asynchronous plan the timeline is that of some mini-batches from an empty pipeline to an
    empty one; ``simulate_async`` says more about it.

    Args:
        plan_: any plan for the profile's model.
        profile: seconds and bytes of the model's operators.
        cluster: where it shall run; may be another one than it was planned for.
        schedule: another schedule than the plan's, with that schedule's own in-flight counts;
            ``auto`` for the faster of those that ``plan`` chooses from, ``published`` for those of
            the planner's paper.
        optimizer_factor: optimizer state in bytes per byte of trainable parameter.
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
    """The plan with the figures that it has on a cluster, by default its own, and the timeline.

    Args:
        schedule: another one than the plan's, as for ``simulate``; the plan then has that.

    Raises:
        InvalidPlanError: if the plan does not suit model and cluster, or says of none.
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


def scheduled(plan_: Plan, cost: CostModel, schedule: str | None = None) -> tuple[StageGraph, str]:
    """The stages of a synchronous plan with their in-flight counts, and the key of the schedule.

    Args:
        schedule: as for ``simulate``, and so are the errors.
    """
    graph, name = plan_.stage_graph, schedule or plan_.schedule
    _require_few(graph)
    if name == "published" and plan_.planner not in planners.PLANNERS:
        raise ValueError(f"planner {plan_.planner!r} is unknown here, and so is its schedule")
    if name in ("auto", "published"):
        chosen = AUTO if name == "auto" else planners.PLANNERS[plan_.planner]().schedules
        judge = Judge(ShortestStep(cost, chosen))
        judge.consider([graph])
        best = judge.winner(plan_.planner)
        if name == "auto":
            _, best = split_backwards(judge, cost) or (0.0, best)
        graph, name = best.graph, best.schedule
    elif schedule is not None and schedule != plan_.schedule:
        if name in LISTS:
            graph = with_lengths(ModelCosts(graph, cost))
        graph = rule_named(name).warm_up(graph)
    _require_suits(graph, cost, shared=True)
    return graph, name


def figures_of(
    timeline: Timeline, graph: StageGraph, cost: CostModel, mode: str = "sync"
) -> Prediction:
    """The figures of a plan by its timeline."""
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
    """The timeline of one step by a schedule that is checked; ``slower`` as ``ModelCosts`` has it,
    ``messages`` as ``run``.
    """
    costs = ModelCosts(graph, cost, slower=slower or {})
    order = checked_order(graph, schedule, costs.message_edges)
    return run(graph, order, costs, period=True, messages=messages)


@dataclass(frozen=True)
class Simulated:
    """Prediction of an asynchronous plan.

    Attributes:
        plan: as simulated, with its policy and figures.
        staleness: per stage, how old its weights are.
        timeline: from an empty pipeline to an empty one.
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
    _require_few(plan_.stage_graph)
    require_asynchronous(plan_, policy)
    cost = CostModel(profile, cluster, optimizer_factor=optimizer_factor)
    name = policy or plan_.policy or "auto"
    if name == "auto":
        whole = _converted(plan_, policy_named("naive"))
        _require_suits(whole, cost)
        may_cut = plan_.stage_graph.num_microbatches(0) >= whole.depth
        name = recommended(whole, cost, optimizer, may_cut=may_cut)[0]
    graph = _converted(plan_, policy_named(name))
    turns = turns_of(plan_, graph, policy_named(name))
    ages = _staleness(graph, name, optimizer, turns)
    versions = tuple(age.versions for age in ages)
    run_graph = turns.graph if turns else graph
    _require_suits(run_graph, cost, versions)
    costs = ModelCosts(run_graph, cost, versions)
    steady = stream.steady(run_graph, costs, turns)
    timeline = stream.record(run_graph, costs, turns=turns)
    shown = replace(
        plan_,
        stage_graph=graph,
        schedule=asynchronous.ORDER,
        mode="async",
        policy=name,
        round_robin=turns is not None,
        shard_optimizer=False,
        sparse_embeddings=False,
        profile=profile.origin,
    ).predicting(prediction(steady, graph, cost), cluster)
    whole = asynchronous.repeated(run_graph, stream.shown(run_graph))
    return Simulated(shown, steady, ages, timeline, whole)


def prediction(steady: stream.Steady, graph: StageGraph, cost: CostModel) -> Prediction:
    """The figures of training once the pipeline is full."""
    bottleneck_s = bottleneck_s_per_sample(graph, cost)
    return Prediction(steady.period_s, bottleneck_s, steady.bubble, steady.device_peak_bytes)


def turns_of(
    plan_: Plan, graph: StageGraph, policy: WeightPolicy
) -> asynchronous.AsynchronousOrder | None:
    """The order of replicas that take mini-batches in turn, where a plan has that and the policy
    allows it; None where they split each.
    """
    if not plan_.round_robin or not may_take_turns(graph, policy):
        return None
    return asynchronous.round_robin(graph)


def _staleness(
    graph: StageGraph,
    policy: str,
    optimizer: OptimizerFacts | None,
    turns: asynchronous.AsynchronousOrder | None = None,
) -> tuple[Staleness, ...]:
    rule = policy_named(policy)
    if optimizer is not None:
        require_optimizer(rule, optimizer)
    last_update = optimizer is not None and optimizer.keeps_last_update
    return staleness(graph, rule, last_update=last_update, turns=turns)


def require_asynchronous(plan_: Plan, policy: str = "") -> None:
    """Accept a plan by itself; of a synchronous one, which is converted, nothing is asked.

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
    graph = asynchronous.warm_up(plan_.stage_graph)
    if policy in ("", plan_.policy):
        rule = policy_named(plan_.policy)
        require_fits(rule, graph, microbatches=graph.num_microbatches(0))


def _require_suits(
    graph: StageGraph, cost: CostModel, versions: Sequence[int] = (), *, shared: bool = False
) -> None:
    problems = check_stages(graph, cost, versions, shared=shared, idle=True)
    if problems:
        raise InvalidPlanError(
            f"the plan does not suit {cost.cluster.name}, or not this model: {'; '.join(problems)}"
        )


def _require_few(graph: StageGraph) -> None:
    if problems := too_many_microbatches(graph):
        raise InvalidPlanError("; ".join(problems))


def synchronous(plan_: Plan) -> Plan:
    """The same stages with a flush after every batch; a synchronous plan as it is."""
    if plan_.mode == "sync":
        return plan_
    graph = rule_named(asynchronous.ORDER).warm_up(plan_.stage_graph)
    return replace(plan_, stage_graph=graph, mode="sync", policy="", round_robin=False)


def _converted(plan_: Plan, policy: WeightPolicy) -> StageGraph:
    """The stages of a plan as they run without a flush."""
    graph = plan_.stage_graph
    if plan_.mode == "async" and graph.num_microbatches(0) == 1 and not policy.microbatches:
        return graph
    if not policy.microbatches:
        size = graph.batch_size
        stages = (replace(stage, microbatch_size=size, k=1) for stage in graph.stages)
        graph = replace(graph, stages=tuple(stages))
    return asynchronous.warm_up(graph)


def check_plan(
    plan_: Plan,
    profile: Profile | None = None,
    cluster: Cluster | None = None,
    *,
    optimizer: OptimizerFacts | None = None,
) -> list[str]:
    """List the faults of a plan, a line each: its schedule and, given both, C1-C4 and memory.

    Raises:
        ValueError: if only one of profile and cluster is given.
    """
    if (profile is None) != (cluster is None):
        raise ValueError("conditions C1-C4 and memory need both a profile and a cluster")
    graph, is_async = plan_.stage_graph, plan_.mode == "async"
    if problems := too_many_microbatches(graph):
        return problems
    edges, problems = EVERY_EDGE, unfit_sizes(graph) if profile is None else []
    versions: tuple[int, ...] = ()
    run_graph = graph
    if is_async:
        try:
            require_asynchronous(plan_)
            turns = turns_of(plan_, graph, policy_named(plan_.policy))
            ages = _staleness(graph, plan_.policy, optimizer, turns)
            versions = tuple(age.versions for age in ages)
            run_graph = turns.graph if turns else graph
        except (InvalidPlanError, PolicyError, ValueError) as error:
            return [str(error)]
    if profile is not None and cluster is not None:
        cost = prices_of(plan_, profile, cluster)
        problems = check_stages(run_graph, cost, versions, shared=not is_async, idle=True)
        if not problems:
            edges = message_edges(graph, profile.graph)
        if is_async and not problems:
            try:
                stream.require_untied(ModelCosts(graph, cost))
            except InvalidPlanError as error:
                problems.append(str(error))
    whole = asynchronous.repeated(graph, stream.shown(graph)) if is_async else graph
    try:
        schedule_of(whole, asynchronous.ORDER if is_async else plan_.schedule, edges)
    except (InvalidScheduleError, ValueError) as error:
        problems.append(str(error))
    return problems


def ideal_step_s(
    plan_: Plan,
    forward_s: Sequence[Mapping[int, float]],
    backward_s: Sequence[Mapping[int, float]],
    *,
    model: OpGraph | None = None,
) -> float:
    """Seconds of a step whose links cost nothing: what the schedule allows for these stage times.

    Of an asynchronous plan, seconds per mini-batch once the pipeline is full.

    Args:
        plan_: stages and schedule.
        forward_s: per stage, {samples of one device's slice: seconds of a forward}.
        backward_s: likewise.
        model: tells stage edges that carry data or gradients from those that only order; by default
            all do.
    """
    graph = plan_.stage_graph
    edges = message_edges(graph, model) if model is not None else EVERY_EDGE
    times = StageTimes(forward_s, backward_s, edges)
    if plan_.mode == "async":
        return stream.steady(graph, times).period_s
    return step_seconds(graph, compute_order(graph, plan_.schedule), times)


def bottleneck_s_per_sample(graph: StageGraph, cost: CostModel) -> float:
    """Compute seconds per sample of the slowest stage, GraphPipe's TPS without communication."""

    def seconds(s: int) -> float:
        stage = graph.stages[s]
        samples, mask = stage.microbatch_size / stage.replicas, cost.graph.mask(stage.operators)
        return sum(cost.stage_s(mask, samples, recompute=stage.recompute)) / stage.microbatch_size

    return max(seconds(s) for s in range(len(graph)))
