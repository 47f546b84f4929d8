"""The one place that joins planner, schedule and simulator.

A planner proposes stage graphs by its own objective. What counts is the step, so the proposals are
scheduled and simulated (``simulator.judge``), and the figures of a plan are always the simulator's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import anabranch.planner as planners
from anabranch import solve_async
from anabranch.cluster import Cluster
from anabranch.cost import CostModel
from anabranch.errors import (
    AnabranchError,
    InvalidPlanError,
    InvalidScheduleError,
    SearchStoppedError,
)
from anabranch.graph.opgraph import OpGraph
from anabranch.planner.base import Improver, Planner
from anabranch.planner.exhaustive import MOST_DEVICES, MOST_OPERATORS
from anabranch.planner_options import bottleneck_s_per_sample as bottleneck_s_per_sample
from anabranch.planner_options import check_arguments, collect, planner_with, uninterrupted
from anabranch.planner_options import options_of as options_of
from anabranch.plans.check import check as check_stages
from anabranch.plans.check import require
from anabranch.plans.edges import EVERY_EDGE, message_edges
from anabranch.plans.plan import Plan, Prediction
from anabranch.plans.stages import StageGraph
from anabranch.profile.profile import Profile
from anabranch.schedule import compute_order, rule_named, schedule_of
from anabranch.simulator.costs import ModelCosts, StageTimes
from anabranch.simulator.judge import Judge
from anabranch.simulator.run import run, step_seconds
from anabranch.simulator.stream import steady
from anabranch.timeline import Timeline
from anabranch.weights import OptimizerFacts

AUTO = ("1f1b", "1f1b-deep")
"""What ``schedule="auto"`` chooses from, least memory first. GPipe holds all micro-batches."""

SOME = (4, 1.15)
MANY = (12, 2.0)
FEW = 24
FEW_DEVICES = 16
"""Proposals whose neighbours are tried beside those of the best, and how much longer their steps
may be: neighbours are rarely better by more. The latter in models of few operators; in these, and
on few devices, each is followed also while it is behind the best."""

SIMULATION = 150_000
IMPROVEMENT = 150_000
"""Micro-batches times devices that may be simulated to judge proposals, those with fewest first,
and to improve on the best of them. Only plans for many hundred devices come near the former."""


def plan(
    profile: Profile,
    cluster: Cluster,
    batch_size: int,
    *,
    planner: str = "graphpipe",
    microbatch_size: int | None = None,
    schedule: str = "auto",
    optimizer_factor: float = 2.0,
    max_replicas: int | None = None,
    planner_options: Mapping[str, object] | None = None,
    model: str = "",
    improve: bool = True,
    mode: str = "sync",
    policy: str = "",
    optimizer: OptimizerFacts | None = None,
) -> Plan:
    """Find the stage graph and schedule with the shortest simulated step.

    For asynchronous training: with the shortest simulated time from one mini-batch to the next.

    An interrupt (Ctrl-C) ends the search; the plan is then the best of what was proposed until
    then, and its notes say so. Without any proposal the interrupt reaches the caller.

    Args:
        profile: seconds and bytes of the model's operators.
        cluster: devices, links and memory.
        batch_size: samples of one step, or of one mini-batch without a flush.
        planner: key of ``planner.PLANNERS``.
        microbatch_size: only this size; by default every power of two that the profile covers.
            Asynchronous mini-batches are one micro-batch, but for policy ``2bw``.
        schedule: key of ``schedule.SCHEDULES``; ``auto``: per proposal the faster of 1F1B with
            minimal and with deep warm-up, the minimal one where both take equally long;
            ``published``: what the planner's paper runs its plans with.
        optimizer_factor: optimizer state in bytes per byte of trainable parameter.
        max_replicas: most replicas of one stage.
        planner_options: values for fields of the planner.
        model: what is planned, for the plan's reader.
        improve: also try what lies near the best proposals, for planners that know what does.
        mode: ``sync`` or ``async``.
        policy: for ``async`` a key of ``weights.POLICIES``, or ``auto`` (the same as none) for the
            one that ``weights.recommend`` names.
        optimizer: for ``async`` what policies have to know of it, if anything is known: it decides
            what ``auto`` chooses, and how many copies of the weights a policy that predicts holds.

    Raises:
        InfeasiblePlanError: if nothing fits the devices.
        PolicyError: if there is no such policy, or it cannot work with the optimizer.
        BudgetError: if the search would take more than it was given.
        ValueError: for an unknown name or a number below 1.
    """
    check_arguments(batch_size, planner, microbatch_size, schedule, max_replicas)
    solve_async.check_mode(mode, policy, schedule)
    if mode == "async":
        return solve_async.plan(
            profile,
            cluster,
            batch_size,
            planner=planner,
            policy=policy or "auto",
            microbatch_size=microbatch_size,
            optimizer_factor=optimizer_factor,
            max_replicas=max_replicas,
            planner_options=planner_options,
            model=model,
            improve=improve,
            optimizer=optimizer,
        )
    cost = CostModel(profile, cluster, optimizer_factor=optimizer_factor)
    notes = ["times are taken as proportional to samples"] if profile.proportional else []
    search, ignored = planner_with(planner, max_replicas, planner_options or {})
    if ignored:
        notes.append(f"planner {planner} has no limit on replicas; {max_replicas} is ignored")
    started = time.perf_counter()
    proposals, stopped = collect(
        search(cost, batch_size=batch_size, microbatch_size=microbatch_size)
    )
    searched = time.perf_counter()
    judge = Judge(cost, _schedules(schedule, search))
    judged = uninterrupted(lambda: judge.consider(proposals, SIMULATION))
    if judge.best is None and not judged:
        judge = _first_that_fits(cost, _schedules(schedule, search), proposals)
    best = judge.winner(planner)
    simulated = time.perf_counter()
    if improve and judged and not stopped and isinstance(search, Improver):
        near = search.neighbourhood(cost, batch_size, microbatch_size)
        few = len(profile.graph) <= FEW
        each = few or cluster.num_devices <= FEW_DEVICES
        judged = uninterrupted(lambda: _improve(judge, near, MANY if few else SOME, each=each))
        best = judge.winner(planner)
    improved = time.perf_counter()
    require(best.graph, cost)
    try:
        timeline = _verified_run(best.graph, best.schedule, cost)
    except KeyboardInterrupt:  # the search is over, and a moment is left: only insisting ends it
        timeline = _verified_run(best.graph, best.schedule, cost)
    finished = time.perf_counter()
    if stopped or not judged:
        why = stopped or "interrupted"
        notes.append(f"{why}: the best of the first {len(proposals)} proposals")
    return Plan(
        stage_graph=best.graph,
        schedule=best.schedule,
        planner=planner,
        model=model or profile.graph.name,
        cluster=cluster.name,
        profile=profile.origin,
        search_s=searched - started,
        simulate_s=simulated - searched + finished - improved,
        improve_s=improved - simulated,
        predicted=Prediction(
            step_s=timeline.step_s,
            bottleneck_s_per_sample=bottleneck_s_per_sample(best.graph, cost),
            bubble=timeline.bubble,
            device_peak_bytes=tuple(timeline.peak_bytes.values()),
        ),
        device=profile.device,
        granularity=profile.graph.granularity,
        notes=tuple(notes),
        machines=cluster,
    )


def comparable(profile: Profile, cluster: Cluster) -> list[str]:
    """The planners worth comparing: all, but ``exhaustive`` only where it takes the model."""
    small = len(profile.graph) <= MOST_OPERATORS and cluster.num_devices <= MOST_DEVICES
    return [name for name in planners.PLANNERS if small or name != "exhaustive"]


def compare(
    profile: Profile,
    cluster: Cluster,
    batch_size: int,
    names: Iterable[str] | None = None,
    *,
    planner_options: Mapping[str, Mapping[str, object]] | None = None,
    **options: Any,
) -> Iterator[tuple[str, Plan | AnabranchError]]:
    """Every planner on the same profile, judged by the same simulator.

    An interrupt (Ctrl-C) ends the search of the planner under way, not the comparison: its plan is
    the best that it has proposed, or a ``SearchStoppedError`` where there is none.

    Args:
        profile: seconds and bytes of the model's operators.
        cluster: devices, links and memory.
        batch_size: samples of one step.
        names: keys of ``planner.PLANNERS``; by default those that ``comparable`` lists.
        planner_options: {planner: {field: value}}.
        options: as for ``plan``, but for the planner and its options.

    Yields:
        Per planner its name and its plan, or the error that says why it has none: nothing fits, its
        search would take more than it was given, or it was interrupted.

    Raises:
        ValueError: for an unknown name or option; before anything is searched.
    """
    chosen = comparable(profile, cluster) if names is None else list(names)
    given = planner_options or {}
    for name in chosen:
        check_arguments(
            batch_size,
            name,
            options.get("microbatch_size"),
            options.get("schedule", "auto"),
            options.get("max_replicas"),
        )
        planner_with(name, options.get("max_replicas"), given.get(name, {}))
    others = ", ".join(name for name in given if name not in chosen)
    if others:
        raise ValueError(f"options for {others}, but {', '.join(chosen)} are compared")

    def search(name: str) -> Plan | AnabranchError:
        mine = given.get(name, {})
        try:
            return plan(profile, cluster, batch_size, planner=name, planner_options=mine, **options)
        except AnabranchError as error:
            return error
        except KeyboardInterrupt:
            return SearchStoppedError("interrupted before it had proposed a plan")

    return ((name, search(name)) for name in chosen)


def simulate(
    plan_: Plan,
    profile: Profile,
    cluster: Cluster,
    *,
    schedule: str | None = None,
    optimizer_factor: float = 2.0,
) -> Timeline:
    """Predict the timeline of one step of a plan.

    Of an asynchronous plan the timeline is that of some mini-batches from an empty pipeline to an
    empty one; ``solve_async.simulate`` says more about it.

    Args:
        plan_: any plan for the profile's model.
        profile: seconds and bytes of the model's operators.
        cluster: where it shall run; may be another one than it was planned for.
        schedule: another schedule than the plan's, with that schedule's own in-flight counts;
            ``auto`` for the faster of those that ``plan`` chooses from, ``published`` for those of
            the planner's paper.
        optimizer_factor: optimizer state in bytes per byte of trainable parameter.

    Raises:
        InvalidPlanError: if the plan does not suit model and cluster; the message lists every
            problem.
        InvalidScheduleError: if its in-flight counts cannot be scheduled.
    """
    if plan_.mode == "async":
        solve_async.check_mode("async", plan_.policy, schedule or "auto")
        return solve_async.simulate(
            plan_, profile, cluster, optimizer_factor=optimizer_factor
        ).timeline
    cost = CostModel(profile, cluster, optimizer_factor=optimizer_factor)
    graph, name = plan_.stage_graph, schedule or plan_.schedule
    if name == "published" and plan_.planner not in planners.PLANNERS:
        raise ValueError(f"planner {plan_.planner!r} is unknown here, and so is its schedule")
    if name in ("auto", "published"):
        chosen = AUTO if name == "auto" else planners.PLANNERS[plan_.planner]().schedules
        judge = Judge(cost, chosen)
        judge.consider([graph])
        best = judge.winner(plan_.planner)
        graph, name = best.graph, best.schedule
    elif schedule is not None and schedule != plan_.schedule:
        graph = rule_named(name).warm_up(graph)
    problems = check_stages(graph, cost, shared=True, idle=True)
    if problems:
        raise InvalidPlanError(
            f"the plan does not suit {cluster.name}, or not this model: {'; '.join(problems)}"
        )
    return _verified_run(graph, name, cost)


def check_plan(
    plan_: Plan,
    profile: Profile | None = None,
    cluster: Cluster | None = None,
    *,
    optimizer: OptimizerFacts | None = None,
) -> list[str]:
    """What is wrong with a plan, one line each: its schedule and, given both, C1-C4 and memory.

    Raises:
        ValueError: if only one of profile and cluster is given.
    """
    if (profile is None) != (cluster is None):
        raise ValueError("conditions C1-C4 and memory need both a profile and a cluster")
    if plan_.mode == "async":
        return solve_async.check_plan(plan_, profile, cluster, optimizer)
    graph, edges, problems = plan_.stage_graph, EVERY_EDGE, []
    if profile is not None and cluster is not None:
        problems = check_stages(graph, CostModel(profile, cluster), shared=True, idle=True)
        if not problems:
            edges = message_edges(graph, profile.graph)
    try:
        schedule_of(graph, plan_.schedule, edges)
    except (InvalidScheduleError, ValueError) as error:
        problems.append(str(error))
    return problems


def ideal_step_s(
    plan_: Plan,
    forward_s: Sequence[Mapping[int, float]],
    backward_s: Sequence[Mapping[int, float]],
    *,
    model: OpGraph | None = None,
    cores: int = 0,
) -> float:
    """Seconds of a step whose links cost nothing: what the schedule allows for these stage times.

    Of an asynchronous plan, seconds per mini-batch once the pipeline is full.

    Args:
        plan_: stages and schedule.
        forward_s: per stage, {samples of one device's slice: seconds of a forward}.
        backward_s: likewise.
        model: tells stage edges that carry data or gradients from those that only order; by default
            all do.
        cores: processor cores that all devices share; 0 where each computes on its own.
    """
    graph = plan_.stage_graph
    edges = message_edges(graph, model) if model is not None else EVERY_EDGE
    times = StageTimes(forward_s, backward_s, cores, edges)
    if plan_.mode == "async":
        return steady(graph, times).period_s
    return step_seconds(graph, compute_order(graph, plan_.schedule), times)


def _verified_run(graph: StageGraph, schedule: str, cost: CostModel) -> Timeline:
    costs = ModelCosts(graph, cost)
    checked = schedule_of(graph, schedule, costs.message_edges, slots=cost.receive_slots)
    return run(graph, checked, costs)


def _first_that_fits(
    cost: CostModel, schedules: Sequence[str], proposals: Iterable[StageGraph]
) -> Judge:
    """The judgement after an interrupt that came before any: the first proposal that fits."""
    for proposal in proposals:
        judge = Judge(cost, schedules)
        judge.consider([proposal])
        if judge.best is not None:
            return judge
    raise KeyboardInterrupt


def _improve(
    judge: Judge,
    near: Callable[[StageGraph], Iterable[StageGraph]],
    starts: tuple[int, float],
    *,
    each: bool,
) -> None:
    """Judge what lies near the best plan, as long as it gets better, and near others unlike it.

    Args:
        judge: knows the proposals.
        near: what lies near a stage graph.
        starts: how many of the others, and how much longer their steps may be.
        each: follow each of the others by itself, also while it is behind the best.
    """
    assert judge.best is not None, "there is something to improve"
    allowed = judge.simulated + IMPROVEMENT
    others = _unlike(judge, *starts)
    _follow(judge, near, judge.best.proposal, allowed)
    for start in others:
        if each:
            way = judge.alone(start)
            _follow(way, near, start, allowed - judge.simulated)
            judge.join(way)
        else:
            _follow(judge, near, start, allowed)


def _follow(
    judge: Judge,
    near: Callable[[StageGraph], Iterable[StageGraph]],
    here: StageGraph,
    allowed: float,
) -> None:
    while judge.consider(near(here), allowed) and judge.best is not None:
        here = judge.best.proposal


def _unlike(judge: Judge, count: int, factor: float) -> list[StageGraph]:
    """Some proposals but for the best, none much longer: the best with each number of stages, and
    then the best of the others.
    """
    assert judge.best is not None, "there is something to improve"
    best = judge.best.proposal
    others = [graph for graph in judge.ranked(factor) if graph != best]
    first = {len(best): best}
    for graph in others:
        first.setdefault(len(graph), graph)
    unlike = list(first.values())[1:]
    return [*unlike, *(graph for graph in others if graph not in unlike)][:count]


def _schedules(name: str, search: Planner) -> tuple[str, ...]:
    if name == "auto":
        return AUTO
    return search.schedules if name == "published" else (name,)
