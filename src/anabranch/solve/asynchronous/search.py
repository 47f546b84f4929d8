"""The search for a plan without a flush: the shortest simulated period, under one policy or any."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from anabranch.cost import CostModel
from anabranch.errors import InfeasiblePlanError
from anabranch.planner.auto.planner import Auto
from anabranch.planner.base import Planner
from anabranch.plans.check import require
from anabranch.plans.edges import edge_values
from anabranch.plans.plan import Plan
from anabranch.plans.stages import MOST_MICROBATCHES, StageGraph
from anabranch.plans.whole_batch import fitted
from anabranch.schedule.asynchronous import ORDER, warm_up
from anabranch.simulator import stream
from anabranch.simulator.costs import ModelCosts
from anabranch.simulator.judge import Judge
from anabranch.simulator.objective import ScheduledProposal, ShortestPeriod
from anabranch.solve.asynchronous.contract_tied import because, contract_tied
from anabranch.solve.asynchronous.every_partition import EveryPartition, brought_down
from anabranch.solve.asynchronous.simulation import prediction
from anabranch.solve.asynchronous.version_demands import Proposals, demands, versions_of_flight
from anabranch.solve.contest import improve
from anabranch.solve.phases import Phases, to_its_end
from anabranch.solve.policy_choice import recommended, require_may_cut
from anabranch.solve.settings import SETTINGS, SearchBudget
from anabranch.weights import (
    OptimizerFacts,
    WeightPolicy,
    keeps,
    may_take_turns,
    optimizer_remark,
    policy_named,
    require_optimizer,
)

BUDGET = SearchBudget(improvement=50_000)


_ANY_STAGES = ("auto", "graphpipe", "exhaustive")
"""Planners that may propose any stages: if no proposal fits, all partitions are tried."""


class AsynchronousSearch:
    """The search for one model on one cluster.

    Tied operators are one operator of the search (``contract_tied``). For the arguments see
    ``solve.plan``.
    """

    def __init__(
        self,
        whole: CostModel,
        batch_size: int,
        microbatch_size: int | None,
        name: str,
        planner: Planner,
        improve: bool,
        optimizer: OptimizerFacts | None,
    ) -> None:
        self._whole, self._contracted = whole, contract_tied(whole.profile)
        self._cost = replace(whole, profile=self._contracted.profile)
        self._batch_size, self._microbatch_size = batch_size, microbatch_size
        self._name, self._optimizer, self._may_improve = name, optimizer, improve
        known = whole.memo.setdefault((Proposals, planner, batch_size), {})
        self._proposals = Proposals(planner, self._cost, batch_size, known)
        self._last_update = optimizer is not None and optimizer.keeps_last_update
        self._phases = Phases()
        self._judges: dict[str, Judge] = {}

    def plan(self, policy: str, model: str, notes: Sequence[str]) -> Plan:
        """Search for the best plan under a policy.

        Raises:
            InfeasiblePlanError: if there is no plan.
            PolicyError: if the policy does not go with the optimizer.
            ValueError: if the policy does not go with the micro-batch size.
        """
        phases, remarks = self._phases, [*notes]
        best: ScheduledProposal | None = None
        if policy == "auto":
            policy, why, best = self._chosen()
            remarks.append(f"policy {policy}: {why}")
        rule = policy_named(policy)
        if self._optimizer is not None:
            require_optimizer(rule, self._optimizer)
        best = best or self._best(rule)
        in_turns = self._in_turns(rule) if phases.stop is None else None
        best = in_turns or best
        order = self._objective(rule, in_turns=in_turns is not None).order(best.graph)
        split = best.graph
        if in_turns:
            sized = replace(best.proposal, batch_size=self._batch_size)
            split = warm_up(fitted(sized, self._cost.graph))

        def made() -> Plan:
            graph = self._contracted.expand(split)
            require(self._contracted.expand(best.graph), self._whole, best.versions)
            steady = stream.steady(order, best.costs)
            stops = phases.notes(self._proposals.count)
            return phases.plan(
                self._whole,
                model,
                stage_graph=graph,
                schedule=ORDER,
                planner=self._name,
                predicted=prediction(steady, best.graph, self._cost),
                notes=(*remarks, *self._remarks(graph, rule), *stops),
                mode="async",
                policy=rule.name,
                round_robin=order.round_robin,
            )

        return to_its_end(made)

    def _best(self, policy: WeightPolicy) -> ScheduledProposal:
        require_may_cut(policy, self._cost.graph)
        judge = self._judges[policy.name] = Judge(self._objective(policy))
        phases = self._phases
        reasons: list[InfeasiblePlanError] = []
        judged = phases.run("simulate_s", lambda: reasons.extend(self._judge(judge, policy)))
        if judge.best is None and reasons and not judge.too_big:
            raise self._with_ties(reasons[0])
        if judge.best is None and not judged:
            raise KeyboardInterrupt
        best = self._winner(judge)
        if self._may_improve and phases.stop is None:
            phases.run("improve_s", lambda: self._improve(judge, policy))
            best = self._winner(judge)
        return best

    def _objective(self, policy: WeightPolicy, *, in_turns: bool = False) -> ShortestPeriod:
        weighs = self._name != "pipedream"  # which publishes turns as they are
        return ShortestPeriod(
            self._cost,
            policy,
            self._batch_size,
            self._last_update,
            in_turns=in_turns,
            weighs_updates=weighs,
            whole=self._apart if because(self._contracted) else None,
        )

    def _apart(self, costs: ModelCosts) -> ModelCosts:
        """Return the prices of the same stages with tied operators apart."""
        return replace(costs, graph=self._contracted.expand(costs.graph), cost=self._whole)

    def _in_turns(self, policy: WeightPolicy) -> ScheduledProposal | None:
        """Return the best proposal whose replicas take mini-batches in turn, if its period gains
        ``turns_gain``; for planner ``pipedream``, whose paper has turns, if it is as short. None if
        operators need a whole mini-batch, as simulated turns are slices of a larger one.
        """
        if self._cost.graph.whole_batch:
            return None
        judge, judged = self._judges[policy.name], Judge(self._objective(policy, in_turns=True))
        gain = -ShortestPeriod.equal if self._name == "pipedream" else SETTINGS.turns_gain
        limit_s = judged.best_s = judge.best_s * (1 - gain)
        near = (g for g in (*judge.ranked(), *judge.unfit) if may_take_turns(g, policy))
        self._phases.run("simulate_s", lambda: judged.consider(near, BUDGET.simulation))
        return judged.best if judged.best_s < limit_s else None

    def _winner(self, judge: Judge) -> ScheduledProposal:
        try:
            return judge.winner(self._name)
        except InfeasiblePlanError as error:
            raise self._with_ties(error) from None

    def _with_ties(self, error: InfeasiblePlanError) -> InfeasiblePlanError:
        if not because(self._contracted):
            return error
        why = f"With these as one operator, {error}; or"
        if len(self._cost.graph) == 1:
            why = "That is all of the model, so nothing is left to cut:"
        return InfeasiblePlanError(
            f"without a flush stages cannot share a parameter: {because(self._contracted)}. {why} "
            "give each operator a parameter of its own, or plan with mode sync"
        )

    def _sizes(self, policy: WeightPolicy) -> Sequence[int]:
        size, batch_size = self._microbatch_size, self._batch_size
        if size is None:
            return microbatch_sizes(batch_size, policy, self._cost.cluster.num_devices)
        if not policy.microbatches and size != batch_size:
            raise ValueError(
                f"micro-batches of {size} samples in mini-batches of {batch_size}: under policy "
                f"{policy.name} every mini-batch is one micro-batch; leave the size out, or use "
                "policy 2bw"
            )
        if batch_size % size:
            raise ValueError(
                f"micro-batches of {size} samples do not divide mini-batches of {batch_size}"
            )
        return [size]

    def _judge(self, judge: Judge, policy: WeightPolicy) -> list[InfeasiblePlanError]:
        """Ask the planner and judge its proposals; return the errors of demands without any."""
        reasons: list[InfeasiblePlanError] = []
        for demand in demands(policy, last_update=self._last_update):
            before = len(judge.too_big)
            for size in self._sizes(policy):
                try:
                    with self._phases.timed("search_s"):
                        proposed = self._proposals.get(size, demand)
                except InfeasiblePlanError as error:
                    reasons.append(error)
                    continue
                self._phases.stop = self._phases.stop or self._proposals.stop
                judge.consider(self._cut(proposed, policy), BUDGET.simulation)
            if len(judge.too_big) == before or self._phases.stop:
                break
        if judge.best is None and self._phases.stop is None:
            judge.consider(self._every_partition(policy), BUDGET.simulation)
        return reasons

    def _cut(self, proposed: Sequence[StageGraph], policy: WeightPolicy) -> list[StageGraph]:
        """Cut the mini-batches of proposals with fewer micro-batches than stages in depth into at
        least as many, if the policy uses micro-batches and replicas leave room for it.
        """
        result = []
        for graph in proposed:
            stages, count = graph.stages, self._batch_size // graph.stages[0].microbatch_size
            if policy.microbatches and self._microbatch_size is None and count < graph.depth:
                most = self._batch_size // graph.depth
                size = next((b for b in range(most, 0, -1) if self._batch_size % b == 0), 0)
                if all(stage.replicas <= size <= stage.microbatch_size for stage in stages):
                    stages = tuple(replace(stage, microbatch_size=size) for stage in stages)
            result.append(replace(graph, stages=stages))
        return result

    def _every_partition(self, policy: WeightPolicy) -> list[StageGraph]:
        """Propose every partition in micro-batches of any size, for planners of ``_ANY_STAGES``."""
        planner: Any = self._proposals.planner
        if self._name not in _ANY_STAGES or self._in_a_row:
            return []
        fewer = brought_down(self._cost.profile)
        every = EveryPartition(
            replace(self._cost, profile=fewer.profile),
            policy,
            self._batch_size,
            planner.max_replicas or self._cost.cluster.num_devices,
            planner.recompute,
            self._last_update,
        )
        sizes = self._sizes(policy)
        if policy.microbatches and self._microbatch_size is None:
            sizes = [b for b in range(self._batch_size, 0, -1) if self._batch_size % b == 0]
        return [fewer.expand(graph) for graph in every.propose(sizes)]

    def _improve(self, judge: Judge, policy: WeightPolicy) -> None:
        """Search on from the judged proposals, if the planner can."""
        planner = self._proposals.planner
        if not isinstance(planner, Auto):
            return
        starts = [replace(graph, batch_size=self._batch_size) for graph in judge.ranked()]
        held = versions_of_flight(policy, last_update=self._last_update)
        search = planner.without_flush(self._cost, self._sizes(policy), starts, held)
        allowed = judge.simulated + BUDGET.simulation
        judge.consider(self._less_waiting(search), allowed)
        improve(judge, search.near, BUDGET)

    @property
    def _in_a_row(self) -> bool:
        return getattr(self._proposals.planner, "shape", "graph") == "chain"

    def _less_waiting(self, graphs: Iterable[StageGraph]) -> Iterator[StageGraph]:
        """Generate every stage graph, and before it the same one with only the edges that carry
        values: other edges make a plan deeper, and rarely quicker.
        """
        for graph in graphs:
            if not self._in_a_row:
                yield replace(graph, edges=tuple(edge_values(graph, self._cost.graph)))
            yield graph

    def _chosen(self) -> tuple[str, str, ScheduledProposal]:
        """Return a policy for ``auto`` that has a plan, the reason, and its best proposal."""
        pieces = "2bw"
        if self._microbatch_size not in (None, self._batch_size):
            why = f"it is the one for micro-batches of {self._microbatch_size} samples"
            return pieces, why, self._best(policy_named(pieces))
        try:
            best = self._best(policy_named("naive"))
        except InfeasiblePlanError as error:
            return pieces, _IN_PIECES, self._in_pieces(pieces, error)
        name, why = recommended(best.graph, self._cost, self._optimizer)
        if name == "naive":
            return name, why, best
        try:
            other = self._best(policy_named(name))
        except InfeasiblePlanError:
            why = f"under {name}, which would be better, nothing fits; expect worse results"
            return "naive", why, best
        # With the versions of the policy another depth may be best, and the reason has numbers.
        again, reason = recommended(other.graph, self._cost, self._optimizer)
        if again != name:
            reason = (
                f"in the fastest pipeline of any policy, {why}; with its versions of the weights "
                f"this one is the fastest, at depth {other.graph.depth}"
            )
        return name, reason, other

    def _in_pieces(self, name: str, whole: InfeasiblePlanError) -> ScheduledProposal:
        try:
            return self._best(policy_named(name))
        except InfeasiblePlanError as error:
            reasons = f"naive {whole}. Under {name} {error}"
            raise InfeasiblePlanError(
                "policy auto has tried naive, which holds the fewest versions of the weights, and "
                f"{name}, which cuts mini-batches into micro-batches; neither has a plan. Under "
                f"{reasons if str(whole) != str(error) else f'both {error}'}"
            ) from None

    def _remarks(self, graph: StageGraph, policy: WeightPolicy) -> list[str]:
        remarks = []
        if len(graph) > 1:
            remarks.append(because(self._contracted))
        if self._optimizer is not None and graph.depth > 1:
            remarks.append(optimizer_remark(policy, self._optimizer))
        again = [str(s) for s, stage in enumerate(graph.stages) if stage.recompute]
        if again and graph.depth > 1 and not keeps(policy):
            remarks.append(
                f"policy {policy.name}: stages {', '.join(again)} recompute, which runs their "
                "forwards again on later weights"
            )
        return [remark for remark in remarks if remark]


_IN_PIECES = (
    "whole mini-batches do not fit under any policy; it cuts them into micro-batches, and weights "
    "are stale by one update at any stage"
)


def microbatch_sizes(batch_size: int, policy: WeightPolicy, most: int) -> Sequence[int]:
    """Return the micro-batch sizes to choose from under a policy, the largest first.

    For a policy that cuts mini-batches these make about 1, 2, 4, ..., ``4 * most`` micro-batches of
    equal size.
    """
    if not policy.microbatches:
        return [batch_size]
    divisors = [m for m in range(1, batch_size + 1) if batch_size % m == 0]
    wanted = [1 << i for i in range(min(4 * most, MOST_MICROBATCHES).bit_length())]
    counts = {next(m for m in divisors if m >= min(w, batch_size)) for w in wanted}
    return [batch_size // m for m in sorted(counts)]
