"""The search for a plan: planners propose stage graphs, the simulator judges them.

Proposals are scheduled and simulated (``simulator.judge``); a plan's figures are the simulator's.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import anabranch.planner as planners
from anabranch.cluster import Cluster
from anabranch.cost import CostModel
from anabranch.errors import (
    AnabranchError,
    InfeasiblePlanError,
    PolicyError,
    SearchStoppedError,
)
from anabranch.planner.base import Improving, Planner
from anabranch.planner.exhaustive import MOST_DEVICES, MOST_OPERATORS
from anabranch.plans.check import require
from anabranch.plans.in_flight import with_in_flight
from anabranch.plans.model_size import ModelSize
from anabranch.plans.plan import Plan, Prediction
from anabranch.plans.stages import StageGraph
from anabranch.profile.profile import Profile
from anabranch.simulator.judge import Judge
from anabranch.simulator.objective import ScheduledProposal, ShortestStep
from anabranch.simulator.stage_costs import stage_costs
from anabranch.solve.asynchronous_search import AsynchronousSearch
from anabranch.solve.improvement import SearchBudget
from anabranch.solve.improvement import improve as improve_on
from anabranch.solve.planner_options import check_arguments, planner_with
from anabranch.solve.policy_choice import check_mode
from anabranch.solve.rewriting import rewrite_notes
from anabranch.solve.simulation import AUTO, bottleneck_s_per_sample, checked_run
from anabranch.solve.stops import collect, stop_note, to_its_end, uninterrupted
from anabranch.weights import POLICIES, OptimizerFacts

BUDGET = SearchBudget()

WORTH_SHARING = 0.001
"""Share of the step that replicas which share the optimizer's state have to save."""


def plan(
    profile: Profile,
    cluster: Cluster,
    batch_size: int,
    *,
    planner: str = "auto",
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
    shard_optimizer: bool | None = None,
    sparse_embeddings: bool = False,
    start: Plan | None = None,
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
        shard_optimizer: whether replicas of a stage share its optimizer state, see ``Pipeline``; by
            default where nothing fits without, or a proposal takes less time with it. Not for
            ``async``.
        sparse_embeddings: whether embedding tables have sparse gradients, see ``ComputeOptions``,
            and an optimizer that takes them. Not for ``async``.
        start: a plan of this model to improve, also one made by hand: planner ``auto`` begins with
            it alone, and what it finds is no slower. Not for ``async``.

    Raises:
        InfeasiblePlanError: if nothing fits the devices.
        InvalidPlanError: if ``start`` does not suit model and cluster.
        PolicyError: if there is no such policy, or it cannot work with the optimizer.
        BudgetError: if the search would take more than it was given.
        ValueError: for an unknown name or a number below 1.
    """
    check_arguments(batch_size, planner, microbatch_size, schedule, max_replicas)
    check_mode(mode, policy, schedule)
    search, ignored = planner_with(planner, max_replicas, planner_options or {})
    notes = notes_on(profile)
    if ignored:
        notes.append(f"planner {planner} has no limit on replicas; {max_replicas} is ignored")
    cost = CostModel(
        profile,
        cluster,
        optimizer_factor=optimizer_factor,
        sparse_embeddings=sparse_embeddings,
        batch_size=batch_size if mode == "sync" else 0,
    )
    begin = None
    if start is not None:
        begin = _start(start, planner, batch_size, microbatch_size, mode)
    if mode == "async":
        if sparse_embeddings:
            raise ValueError("sparse_embeddings is for mode sync; without a flush, leave it out")
        if shard_optimizer:
            raise ValueError("shard_optimizer is for mode sync; without a flush, leave it out")
        asynchronous = AsynchronousSearch(
            cost, batch_size, microbatch_size, planner, search, improve, optimizer
        )
        return asynchronous.plan(policy or "auto", model, notes)
    task = StepSearch(batch_size, planner, search, microbatch_size, schedule, improve, model, begin)
    return task.find(cost, notes, shard_optimizer).plan()


@dataclass(frozen=True)
class StepSearch:
    """A search for the shortest step; the fields are arguments of ``plan``."""

    batch_size: int
    planner: str
    search: Planner
    microbatch_size: int | None
    schedule: str
    improve: bool
    model: str
    start: StageGraph | None = None

    def _propose(self, cost: CostModel) -> Iterable[StageGraph]:
        search: Any = self.search  # of planners, only auto takes a start
        start = {}
        if self.start is not None:
            require(self.start, cost)
            start = {"start": self.start}
        found: Iterable[StageGraph] = search(
            cost, batch_size=self.batch_size, microbatch_size=self.microbatch_size, **start
        )
        return found

    def find(
        self, cost: CostModel, notes: Sequence[str], shard_optimizer: bool | None = None
    ) -> SearchResult:
        """The plan with the shortest simulated step; ``shard_optimizer`` as for ``plan``."""
        may_share = shard_optimizer is None and cost.cluster.num_devices > 1
        if shard_optimizer:
            cost = replace(cost, shard_optimizer=True)
        with _new_garbage_only():
            try:
                return self._find(cost, notes, may_share=may_share)
            except InfeasiblePlanError:
                if may_share:
                    with suppress(InfeasiblePlanError):
                        return self._find(replace(cost, shard_optimizer=True), notes)
                raise

    def _find(
        self, cost: CostModel, notes: Sequence[str], *, may_share: bool = False
    ) -> SearchResult:
        started = time.perf_counter()
        search = self._propose(cost)
        improving = search if isinstance(search, Improving) else None
        proposals, stopped = collect(search)
        searched = time.perf_counter()
        objective = ShortestStep(cost, _schedules(self.schedule, self.search))
        judge = Judge(objective)

        def consider() -> None:
            if self.start is not None:  # before any other, so that every schedule of it is tried
                judge.consider([self.start], BUDGET.simulation)
            if improving is not None:
                judge.consider(improving.likely(), BUDGET.likely, in_order=True)
            judge.consider(proposals, BUDGET.simulation)

        def share(sharing: Judge, shared: CostModel) -> None:
            near: Iterable[StageGraph]
            if improving is not None:
                known = filter(_is_replicated, (*judge.seconds(), *judge.unfit))
                near = improving.sharing(known, sharing.best_s)
            else:
                gaining = _may_gain(judge, sharing.best_s, shared, cost)
                near = filter(_is_replicated, (*gaining, *judge.unfit))
            sharing.consider(near, BUDGET.simulation, in_order=True)

        judged = uninterrupted(consider)
        if judge.best is None and not judged:
            judge = _first_that_fits(objective, proposals)
        if may_share and judged and not stopped:
            shared = replace(cost, shard_optimizer=True)
            sharing = Judge(ShortestStep(shared, objective.schedules))
            sharing.best_s = limit = judge.best_s * (1 - WORTH_SHARING)
            judged = uninterrupted(lambda: share(sharing, shared))
            if sharing.best_s < limit:
                judge, cost = sharing, shared
        simulated = time.perf_counter()
        if improving is not None and self.improve and judged and not stopped:
            near = partial(improving.near, shared=cost.shard_optimizer)
            judged = uninterrupted(lambda: improve_on(judge, near, BUDGET))
        improved = time.perf_counter()
        best = judge.winner(self.planner)
        stop = stopped if judged else KeyboardInterrupt()
        stops = [stop_note(stop, len(proposals))] if stop else []
        if improving is not None and (origin := improving.origin(best.proposal)):
            stops.insert(0, origin)
        return SearchResult(
            self,
            best,
            judge.best_s,
            cost,
            searched - started,
            simulated - searched,
            improved - simulated,
            (*notes, *stops),
            isinstance(stop, KeyboardInterrupt),
        )


@dataclass(frozen=True)
class SearchResult:
    """The best of a search.

    Attributes:
        step_s: as simulated; infinite where an interrupt came before that.
        cost: what it was priced by.
        search_s: see ``Plan``, as for the rest.
    """

    search: StepSearch
    best: ScheduledProposal
    step_s: float
    cost: CostModel
    search_s: float
    simulate_s: float
    improve_s: float
    notes: tuple[str, ...]
    interrupted: bool

    def plan(self) -> Plan:
        """The plan, with all figures of its step by a schedule that is checked."""
        return to_its_end(self._plan)

    def _plan(self) -> Plan:
        best, cost, started = self.best, self.cost, time.perf_counter()
        require(best.graph, cost)
        timeline = checked_run(best.graph, best.schedule, cost, messages=False)
        return Plan(
            stage_graph=best.graph,
            schedule=best.schedule,
            planner=self.search.planner,
            model=self.search.model or cost.profile.graph.name,
            cluster=cost.cluster.name,
            profile=cost.profile.origin,
            search_s=self.search_s,
            simulate_s=self.simulate_s + time.perf_counter() - started,
            improve_s=self.improve_s,
            predicted=Prediction(
                step_s=timeline.step_s,
                bottleneck_s_per_sample=bottleneck_s_per_sample(best.graph, cost),
                bubble=timeline.bubble,
                device_peak_bytes=tuple(timeline.peak_bytes.values()),
                period_s=timeline.period_s,
                exposed_sums=timeline.exposed_sums,
            ),
            device=cost.profile.device,
            granularity=cost.profile.graph.granularity,
            rewrites=cost.profile.graph.rewrites,
            notes=self.notes,
            machines=cost.cluster,
            shard_optimizer=cost.shard_optimizer,
            sparse_embeddings=cost.sparse_embeddings,
            model_size=ModelSize.of(cost.graph),
            interrupted=self.interrupted,
        )


def _start(
    start: Plan, planner: str, batch_size: int, microbatch_size: int | None, mode: str
) -> StageGraph:
    """The stages of a plan to begin with, for batches of this size."""
    if planner not in ("auto", "chain") or mode != "sync" or start.mode != "sync":
        raise ValueError(
            f"only planner auto begins with a plan, in mode sync and with a plan for it; this is "
            f"planner {planner} in mode {mode} and a plan for mode {start.mode}"
        )
    sizes = sorted({stage.microbatch_size for stage in start.stage_graph.stages})
    if microbatch_size is not None and sizes != [microbatch_size]:
        raise ValueError(
            f"the plan to begin with has micro-batches of {', '.join(map(str, sizes))} samples, "
            f"not of {microbatch_size}; leave the micro-batch size out"
        )
    graph = replace(start.stage_graph, batch_size=batch_size)
    return with_in_flight(graph, [0] * len(graph))


def notes_on(profile: Profile) -> list[str]:
    """Remarks on a profile for readers of its figures."""
    notes = ["times are taken as proportional to samples"] if profile.proportional else []
    return notes + rewrite_notes(profile.graph.rewrites)


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
        names: keys of ``planner.PLANNERS``; by default those that ``comparable`` lists.
        planner_options: {planner: {field: value}}.
        options: others of ``plan``, as are the first arguments.

    Yields:
        Per planner its name and its plan, or the error that says why it has none: nothing fits, its
        search would take more than it was given, or it was interrupted.

    Raises:
        ValueError: for an unknown name or option; before anything is searched.
    """
    chosen = comparable(profile, cluster) if names is None else list(names)
    given = planner_options or {}
    for name in chosen:
        _asked(name, batch_size, given, options)
    others = ", ".join(name for name in given if name not in chosen)
    if others:
        raise ValueError(f"options for {others}, but {', '.join(chosen)} are compared")

    def search(name: str) -> Plan:
        mine = given.get(name, {})
        return plan(profile, cluster, batch_size, planner=name, planner_options=mine, **options)

    return ((name, _plan_or_why(partial(search, name))) for name in chosen)


def compare_policies(
    profile: Profile,
    cluster: Cluster,
    batch_size: int,
    names: Sequence[str],
    policies: Sequence[str] = tuple(POLICIES),
    *,
    planner_options: Mapping[str, Mapping[str, object]] | None = None,
    optimizer_factor: float = 2.0,
    model: str = "",
    improve: bool = True,
    optimizer: OptimizerFacts | None = None,
    microbatch_size: int | None = None,
    max_replicas: int | None = None,
) -> Iterator[tuple[str, str, Plan | AnabranchError]]:
    """Every weight policy under every planner, judged by the same simulator.

    A planner is asked once for all policies. An interrupt (Ctrl-C) ends the search under way.

    Args:
        names: keys of ``planner.PLANNERS``.
        policies: keys of ``weights.POLICIES``.
        planner_options: {planner: {field: value}}.
        microbatch_size: policies that it does not suit have an error. This and the rest are those
            of ``plan``.

    Yields:
        Planner, policy, and their plan or why there is none.

    Raises:
        ValueError: for an unknown name or option, before anything is searched.
    """
    cost = CostModel(profile, cluster, optimizer_factor=optimizer_factor)
    size, given = microbatch_size, planner_options or {}
    options = {"microbatch_size": size, "max_replicas": max_replicas}
    asked = {name: _asked(name, batch_size, given, options) for name in names}
    searches = {
        name: AsynchronousSearch(cost, batch_size, size, name, search, improve, optimizer)
        for name, search in asked.items()
    }
    for policy in policies:
        check_mode("async", policy)
    notes = notes_on(profile)

    def search(name: str, policy: str) -> Plan:
        try:
            return searches[name].plan(policy, model, notes)
        except ValueError as error:  # a micro-batch size that suits other policies
            raise PolicyError(str(error)) from None

    return (
        (name, policy, _plan_or_why(partial(search, name, policy)))
        for name in names
        for policy in policies
    )


def _asked(
    name: str,
    batch_size: int,
    given: Mapping[str, Mapping[str, object]],
    options: Mapping[str, Any],
) -> Planner:
    """The planner, if all that it is asked for makes sense."""
    most = options.get("max_replicas")
    schedule = options.get("schedule", "auto")
    check_arguments(batch_size, name, options.get("microbatch_size"), schedule, most)
    return planner_with(name, most, given.get(name, {}))[0]


def _plan_or_why(search: Callable[[], Plan]) -> Plan | AnabranchError:
    try:
        return search()
    except AnabranchError as error:
        return error
    except KeyboardInterrupt:
        return SearchStoppedError("interrupted before it had proposed a plan")


@contextmanager
def _new_garbage_only() -> Iterator[None]:
    """Garbage is looked for in what comes, not again and again in all that is there: modules and
    a profile are most of what a short search would look at.
    """
    if gc.get_freeze_count():  # as a caller wants it
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _may_gain(judge: Judge, limit: float, cost: CostModel, unshared: CostModel) -> list[StageGraph]:
    """Proposals of a judge, of a search without, that may take less than a limit where replicas
    share the optimizer's state: an update took long, or there is memory for a faster way to run.
    """

    def least_s(proposal: StageGraph, seconds: float) -> float:
        """Its seconds, less what its longest update is shortened by, if that may be enough."""
        size = proposal.batch_size
        updates = (stage_costs(unshared, s, size).update_s for s in proposal.stages)
        if seconds - max(updates) > limit:  # which is known, unlike what is left of them
            return seconds
        return seconds - max(
            stage_costs(unshared, stage, size).update_s - stage_costs(cost, stage, size).update_s
            for stage in proposal.stages
        )

    known = {p: least_s(p, seconds) for p, seconds in judge.seconds().items()}
    return sorted((p for p in known if known[p] <= limit), key=known.__getitem__)


def _is_replicated(graph: StageGraph) -> bool:
    return any(stage.replicas > 1 for stage in graph.stages)


def _first_that_fits(objective: ShortestStep, proposals: Iterable[StageGraph]) -> Judge:
    """The judgement after an interrupt that came before any: the first proposal that fits."""
    for proposal in proposals:
        judge = Judge(objective)
        judge.consider([proposal])
        if judge.best is not None:
            return judge
    raise KeyboardInterrupt


def _schedules(name: str, search: Planner) -> tuple[str, ...]:
    if name == "auto":
        return AUTO
    return search.schedules if name == "published" else (name,)
