"""The best asynchronous plan under a policy, or under many, by the simulated period.

Proposals (``solve_async.proposals``) are judged with the memory of all weight versions
(``simulator.judge_async``). What policies have in common, the proposals, is searched once.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from anabranch.cluster import Cluster
from anabranch.cost import CostModel
from anabranch.errors import (
    AnabranchError,
    InfeasiblePlanError,
    PolicyError,
    SearchStoppedError,
)
from anabranch.planner.exhaustive import Exhaustive
from anabranch.planner.graphpipe import GraphPipe
from anabranch.planner_options import (
    bottleneck_s_per_sample,
    check_arguments,
    planner_with,
    uninterrupted,
)
from anabranch.plans.check import require
from anabranch.plans.plan import Plan, Prediction
from anabranch.plans.stages import StageGraph
from anabranch.profile.profile import Profile
from anabranch.simulator.judge_async import AsyncCandidate, AsyncJudge, microbatch_sizes
from anabranch.solve_async.contract_tied import Together, untied
from anabranch.solve_async.modes import SCHEDULE, check_mode, recommended
from anabranch.solve_async.partitions import Partitions, brought_down
from anabranch.solve_async.proposals import Demand, Proposals, demands
from anabranch.weights import (
    POLICIES,
    OptimizerFacts,
    WeightPolicy,
    keeps,
    optimizer_remark,
    policy_named,
    require_optimizer,
)

SIMULATION = 150_000
IMPROVEMENT = 50_000
"""Micro-batches times devices that may be simulated to judge proposals, and to improve the best."""


@dataclass
class _Search:
    """One model on one cluster: what all policies have in common.

    The operators that are searched are those of the model with tied ones as one
    (``solve_async.contract_tied``).
    """

    together: Together
    cost: CostModel
    batch_size: int
    microbatch_size: int | None
    planner: str
    proposals: Proposals
    improve: bool
    optimizer: OptimizerFacts | None
    simulate_s: float = 0.0
    improve_s: float = 0.0

    def best(self, policy: WeightPolicy) -> tuple[AsyncCandidate, bool]:
        """The best plan under a policy, and whether the search came to its end.

        Raises:
            InfeasiblePlanError: if there is none.
        """
        judge = AsyncJudge(
            self.cost, policy, self.batch_size, last_update=self._keeps_last_update()
        )
        started, searched = time.perf_counter(), self.proposals.search_s
        reasons: list[InfeasiblePlanError] = []
        finished = uninterrupted(lambda: reasons.extend(self._judge(judge, policy)))
        if judge.best is None and reasons and not judge.too_big:
            raise self._with_ties(reasons[0])
        if judge.best is None and not finished:
            raise KeyboardInterrupt
        best = self._winner(judge)
        judged = time.perf_counter()
        self.simulate_s += judged - started - (self.proposals.search_s - searched)
        if self.improve and finished and not self.proposals.stopped:
            finished = uninterrupted(lambda: self._improve(judge, policy))
            best = self._winner(judge)
            self.improve_s += time.perf_counter() - judged
        return best, finished and not self.proposals.stopped

    def _winner(self, judge: AsyncJudge) -> AsyncCandidate:
        try:
            return judge.winner(self.planner)
        except InfeasiblePlanError as error:
            raise self._with_ties(error) from None

    def _with_ties(self, error: InfeasiblePlanError) -> InfeasiblePlanError:
        if not self.together.because:
            return error
        return InfeasiblePlanError(
            f"without a flush stages cannot share a parameter: {self.together.because}. With these "
            f"as one operator, {error}; or give each operator a parameter of its own, or plan with "
            "mode sync"
        )

    def _keeps_last_update(self) -> bool:
        return self.optimizer is not None and self.optimizer.keeps_last_update

    def _demands(self, policy: WeightPolicy) -> list[Demand]:
        return demands(policy, last_update=self._keeps_last_update())

    def _sizes(self, policy: WeightPolicy) -> Sequence[int]:
        sizes = microbatch_sizes(self.batch_size, policy, self.cost.cluster.num_devices)
        if self.microbatch_size is None:
            return sizes
        if not policy.microbatches and self.microbatch_size != self.batch_size:
            raise ValueError(
                f"micro-batches of {self.microbatch_size} samples in mini-batches of "
                f"{self.batch_size}: under policy {policy.name} every mini-batch is one "
                "micro-batch; leave the size out, or use policy 2bw"
            )
        if self.batch_size % self.microbatch_size:
            raise ValueError(
                f"micro-batches of {self.microbatch_size} samples do not divide mini-batches of "
                f"{self.batch_size}"
            )
        return [self.microbatch_size]

    def _judge(self, judge: AsyncJudge, policy: WeightPolicy) -> list[InfeasiblePlanError]:
        """Ask and judge; why there were no proposals, where there were none."""
        reasons: list[InfeasiblePlanError] = []
        for demand in self._demands(policy):
            before = len(judge.too_big)
            for size in self._sizes(policy):
                try:
                    proposed = self.proposals.get(size, demand)
                except InfeasiblePlanError as error:
                    reasons.append(error)
                    continue
                judge.consider(self._cut(proposed, policy), SIMULATION)
            if len(judge.too_big) == before or self.proposals.stopped:
                break
        if judge.best is None and not self.proposals.stopped:
            judge.consider(self._all(policy), SIMULATION)
        return reasons

    def _cut(self, proposed: Sequence[StageGraph], policy: WeightPolicy) -> list[StageGraph]:
        """Proposals with as many micro-batches as the policy takes for their depth, if there are so
        many, where the planner took fewer.
        """
        result = []
        for graph in proposed:
            stages, count = graph.stages, self.batch_size // graph.stages[0].microbatch_size
            if policy.microbatches and self.microbatch_size is None and count < graph.depth:
                most = self.batch_size // graph.depth
                size = next((b for b in range(most, 0, -1) if self.batch_size % b == 0), 0)
                if all(stage.replicas <= size <= stage.microbatch_size for stage in stages):
                    stages = tuple(replace(stage, microbatch_size=size) for stage in stages)
            result.append(replace(graph, stages=stages))
        return result

    def _all(self, policy: WeightPolicy) -> list[StageGraph]:
        """What a search of all partitions proposes, for planners whose stages may be any, in
        micro-batches of any size.
        """
        search = self.proposals.search
        if not isinstance(search, GraphPipe | Exhaustive):
            return []
        fewer = brought_down(self.cost.profile)
        found = Partitions(
            replace(self.cost, profile=fewer.profile),
            policy,
            self.batch_size,
            search.max_replicas or self.cost.cluster.num_devices,
            search.recompute,
            self._keeps_last_update(),
        )
        sizes = self._sizes(policy)
        if policy.microbatches and self.microbatch_size is None:
            sizes = [b for b in range(self.batch_size, 0, -1) if self.batch_size % b == 0]
        return [fewer.apart(graph) for graph in found.propose(sizes)]

    def _improve(self, judge: AsyncJudge, policy: WeightPolicy) -> None:
        """Judge what lies near the best plan, as long as it gets better."""
        assert judge.best is not None, "there is something to improve"
        demand = self._demands(policy)[1 if judge.too_big else 0]
        near = self.proposals.near(judge.best.graph.stages[0].microbatch_size, demand)
        allowed = judge.simulated + IMPROVEMENT
        while near is not None and judge.consider(near(judge.best.proposal), allowed):
            pass


def plan(
    profile: Profile,
    cluster: Cluster,
    batch_size: int,
    *,
    planner: str = "graphpipe",
    policy: str = "auto",
    microbatch_size: int | None = None,
    optimizer_factor: float = 2.0,
    max_replicas: int | None = None,
    planner_options: Mapping[str, object] | None = None,
    model: str = "",
    improve: bool = True,
    optimizer: OptimizerFacts | None = None,
) -> Plan:
    """Find the stage graph with the shortest simulated period; arguments as for ``solve.plan``.

    Raises:
        InfeasiblePlanError: if nothing fits the devices with the weights of the policy.
        BudgetError: if the search would take more than it was given.
        PolicyError: if there is no such policy, or it cannot work with the optimizer.
        ValueError: for an unknown name or a number below 1.
    """
    check_arguments(batch_size, planner, microbatch_size, SCHEDULE, max_replicas)
    check_mode("async", policy)
    search, ignored = planner_with(planner, max_replicas, planner_options or {})
    notes = ["times are taken as proportional to samples"] if profile.proportional else []
    if ignored:
        notes.append(f"planner {planner} has no limit on replicas; {max_replicas} is ignored")
    together = untied(profile)
    cost = CostModel(together.profile, cluster, optimizer_factor=optimizer_factor)
    one = _Search(
        together,
        cost,
        batch_size,
        microbatch_size,
        planner,
        Proposals(search, cost, batch_size),
        improve,
        optimizer,
    )
    return _plan(one, policy, model, notes)


def compare(
    profile: Profile,
    cluster: Cluster,
    batch_size: int,
    planners: Sequence[str],
    policies: Sequence[str] = tuple(POLICIES),
    *,
    planner_options: Mapping[str, Mapping[str, object]] | None = None,
    microbatch_size: int | None = None,
    optimizer_factor: float = 2.0,
    max_replicas: int | None = None,
    model: str = "",
    improve: bool = True,
    optimizer: OptimizerFacts | None = None,
) -> Iterator[tuple[str, str, Plan | AnabranchError]]:
    """Every policy under every planner, judged by the same simulator.

    A planner is asked once for all policies. An interrupt (Ctrl-C) ends the search under way.

    Args:
        profile: seconds and bytes of the model's operators.
        cluster: devices, links and memory.
        batch_size: samples of one mini-batch.
        planners: keys of ``planner.PLANNERS``.
        policies: keys of ``weights.POLICIES``.
        planner_options: {planner: {field: value}}.
        microbatch_size: as for ``plan``; policies that it does not suit have an error.
        optimizer_factor: as for ``plan``.
        max_replicas: as for ``plan``.
        model: as for ``plan``.
        improve: as for ``plan``.
        optimizer: as for ``plan``.

    Yields:
        Planner, policy, and their plan or why there is none.

    Raises:
        ValueError: for an unknown name or option, before anything is searched.
    """
    given = planner_options or {}
    together = untied(profile)
    cost = CostModel(together.profile, cluster, optimizer_factor=optimizer_factor)
    searches: dict[str, _Search] = {}
    for name in planners:
        check_arguments(batch_size, name, microbatch_size, SCHEDULE, max_replicas)
        search, _ = planner_with(name, max_replicas, given.get(name, {}))
        proposals = Proposals(search, cost, batch_size)
        searches[name] = _Search(
            together, cost, batch_size, microbatch_size, name, proposals, improve, optimizer
        )
    for policy in policies:
        check_mode("async", policy)
    notes = ["times are taken as proportional to samples"] if profile.proportional else []

    def one(name: str, policy: str) -> Plan | AnabranchError:
        try:
            return _plan(searches[name], policy, model, notes)
        except AnabranchError as error:
            return error
        except ValueError as error:  # a micro-batch size that suits other policies
            return PolicyError(str(error))
        except KeyboardInterrupt:
            return SearchStoppedError("interrupted before it had proposed a plan")

    return ((name, policy, one(name, policy)) for name in planners for policy in policies)


def _plan(search: _Search, name: str, model: str, notes: Sequence[str]) -> Plan:
    """The best plan of a search under a policy, with what it took since it was last asked."""
    before = search.proposals.search_s, search.simulate_s, search.improve_s
    remarks = [*notes]
    found: tuple[AsyncCandidate, bool] | None = None
    if name == "auto":
        name, why, found = _chosen(search)
        remarks.append(f"policy {name}: {why}")
    policy = policy_named(name)
    if search.optimizer is not None:
        require_optimizer(policy, search.optimizer)
    best, finished = found or search.best(policy)
    graph, profile, cluster = (
        search.together.apart(best.graph),
        search.together.whole,
        search.cost.cluster,
    )
    require(graph, replace(search.cost, profile=profile), best.versions)
    remarks += _remarks(graph, policy, search)
    if not finished:
        why = search.proposals.stopped or "interrupted"
        remarks.append(f"{why}: the best of the first {search.proposals.count} proposals")
    return Plan(
        stage_graph=graph,
        schedule=SCHEDULE,
        planner=search.planner,
        model=model or profile.graph.name,
        cluster=cluster.name,
        profile=profile.origin,
        search_s=search.proposals.search_s - before[0],
        simulate_s=search.simulate_s - before[1],
        improve_s=search.improve_s - before[2],
        predicted=Prediction(
            step_s=best.steady.period_s,
            bottleneck_s_per_sample=bottleneck_s_per_sample(best.graph, search.cost),
            bubble=best.steady.bubble,
            device_peak_bytes=best.steady.device_peak_bytes,
        ),
        device=profile.device,
        granularity=profile.graph.granularity,
        notes=tuple(remarks),
        machines=cluster,
        mode="async",
        policy=name,
    )


def _chosen(search: _Search) -> tuple[str, str, tuple[AsyncCandidate, bool]]:
    """The policy for ``auto``, one that has a plan, why, and what the search has found under it.

    Naive holds the fewest versions of the weights, so if it has no plan, only a policy can have one
    whose mini-batches go through in pieces.

    Raises:
        InfeasiblePlanError: if there is no plan under any policy.
    """
    pieces = "2bw"
    if search.microbatch_size not in (None, search.batch_size):
        why = f"it is the one for micro-batches of {search.microbatch_size} samples"
        return pieces, why, search.best(policy_named(pieces))
    try:
        found, finished = search.best(policy_named("naive"))
    except InfeasiblePlanError as error:
        return pieces, _IN_PIECES, _in_pieces(search, pieces, error)
    if not finished:
        search.proposals.stop("interrupted")
    name, why = recommended(found.graph, search.cost, search.optimizer)
    if name == "naive":
        return name, why, (found, finished)
    try:
        best, finished = search.best(policy_named(name))
        # With the versions of the policy another depth may be best, and the reason has numbers.
        again, reason = recommended(best.graph, search.cost, search.optimizer)
        return name, reason if again == name else _FASTEST + why, (best, finished)
    except InfeasiblePlanError:
        why = f"under {name}, which would be better, nothing fits; expect worse results"
        return "naive", why, (found, finished)


_FASTEST = "in the fastest pipeline of any policy, "

_IN_PIECES = (
    "whole mini-batches do not fit under any policy; it cuts them into micro-batches, and weights "
    "are stale by one update at any stage"
)


def _in_pieces(
    search: _Search, name: str, whole: InfeasiblePlanError
) -> tuple[AsyncCandidate, bool]:
    try:
        return search.best(policy_named(name))
    except InfeasiblePlanError as error:
        raise InfeasiblePlanError(
            "policy auto has tried naive, which holds the fewest versions of the weights, and "
            f"{name}, which cuts mini-batches into micro-batches; neither has a plan. Under naive "
            f"{whole}. Under {name} {error}"
        ) from None


def _remarks(graph: StageGraph, policy: WeightPolicy, search: _Search) -> list[str]:
    """What a reader of the figures should know."""
    remarks = []
    if search.together.because and len(graph) > 1:
        remarks.append(search.together.because)
    if search.optimizer is not None and graph.depth > 1:
        remarks.append(optimizer_remark(policy, search.optimizer))
    again = [s for s, stage in enumerate(graph.stages) if stage.recompute]
    if again and graph.depth > 1 and not keeps(policy):
        remarks.append(
            f"stages {', '.join(map(str, again))} recompute, which under policy {policy.name} "
            "runs their forwards again on later weights"
        )
    return [remark for remark in remarks if remark]
