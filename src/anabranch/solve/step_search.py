"""The search for the shortest step: proposals of a planner in every way to run them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, cast

from anabranch.cost import CostModel
from anabranch.errors import InfeasiblePlanError
from anabranch.planner.auto.search import Search
from anabranch.planner.base import Planner
from anabranch.plans.check import require
from anabranch.plans.plan import Plan
from anabranch.plans.stages import StageGraph
from anabranch.simulator.judge import Judge
from anabranch.simulator.objective import ShortestStep
from anabranch.solve.bound import step_bound
from anabranch.solve.contest import Contest
from anabranch.solve.phases import Phase, Phases, collect, to_its_end
from anabranch.solve.settings import SETTINGS, SearchBudget
from anabranch.solve.simulation import checked_run, figures_of

BUDGET = SearchBudget()


@dataclass(frozen=True)
class StepSearch:
    """A search for the shortest step; its fields are arguments of ``plan``."""

    batch_size: int
    name: str
    planner: Planner
    microbatch_size: int | None
    schedules: tuple[str, ...]
    improve: bool
    model: str
    start: StageGraph | None
    notes: Sequence[str]

    def fitting(self, cost: CostModel, *, may_share: bool) -> Plan:
        """Search for the plan with the shortest simulated step; if nothing fits, search again with
        replicas that share the optimizer's state.
        """
        try:
            return self.plan(cost, may_share=may_share)
        except InfeasiblePlanError:
            if may_share:
                with suppress(InfeasiblePlanError):
                    return self.plan(replace(cost, shard_optimizer=True))
            raise

    def plan(self, cost: CostModel, *, may_share: bool = False) -> Plan:
        """Search for the plan with the shortest simulated step.

        Args:
            may_share: whether replicas may share the optimizer's state if ``cost`` does not.
        """
        phases, notes, planner = Phases(), [*self.notes], self.planner
        contest, search, count = self._decide(cost, phases, may_share)
        if self.start is None and contest.is_misled and getattr(planner, "shape", "") == "graph":
            chained = replace(self, planner=replace(cast(Any, planner), shape="chain"))
            decided = chained._decide(cost, phases, may_share)
            if decided[0].best_s < contest.best_s:
                contest, search, count = decided
        if self.improve and phases.stop is None:
            looped = self.start if self.start is not None and self.start.shares_devices else None
            phases.run("improve_s", lambda: contest.loop(looped))
        best, cost = contest.winner(self.name), contest.cost
        if isinstance(search, Search) and (origin := search.origin(best.proposal)):
            notes.append(origin)
        notes += phases.notes(count)

        def made() -> Plan:
            with phases.timed("simulate_s"):
                require(best.graph, cost, shared=True)
                timeline = checked_run(best.graph, best.schedule, cost, messages=False)
                figures = figures_of(timeline, best.graph, cost)
            return phases.plan(
                cost,
                self.model,
                stage_graph=best.graph,
                schedule=best.schedule,
                planner=self.name,
                predicted=figures,
                notes=tuple(notes),
                shard_optimizer=cost.shard_optimizer,
                sparse_embeddings=cost.sparse_embeddings,
            )

        return to_its_end(made)

    def _decide(
        self, cost: CostModel, phases: Phases, may_share: bool
    ) -> tuple[Contest, Iterable[StageGraph], int]:
        """Return the contest at its end, the search, and the number of its proposals."""
        # Nothing is shorter than the bound.
        enough_s = step_bound(cost, self.batch_size) * (1 + SETTINGS.bound_met)
        with phases.timed("search_s"):
            search = self._propose(cost, may_share=may_share)
            improving = search if isinstance(search, Search) else None
            until = self._until(search, cost, enough_s) if improving else search
            proposals, phases.stop = collect(until)
        contest = Contest(cost, self.schedules, improving, BUDGET, may_share=may_share)
        judged = phases.run("simulate_s", lambda: self._judge(contest.judge, improving, proposals))
        if contest.judge.best is None and not judged:
            contest.judge = self._first_that_fits(cost, proposals)
        steps: list[tuple[Phase, Callable[[], object]]] = [("simulate_s", contest.share)]
        steps += [("improve_s", contest.improve)] * self.improve
        steps += [("simulate_s", contest.split)]
        for phase, step in steps:
            if phases.stop is None and contest.best_s > enough_s:
                phases.run(phase, step)
        may_go_on = improving is not None and self.improve
        while may_go_on and phases.stop is None and contest.best_s > enough_s:
            if not phases.run("improve_s", contest.search_on) or contest.is_over:
                break
        return contest, search, len(proposals)

    def _propose(self, cost: CostModel, *, may_share: bool) -> Iterable[StageGraph]:
        planner: Any = self.planner  # of planners, only auto takes a start
        start = {}
        if self.start is not None:
            sharing = replace(cost, shard_optimizer=cost.shard_optimizer or may_share)
            require(self.start, sharing, shared=True)
            start = {"start": self.start}
        proposals: Iterable[StageGraph] = planner(
            cost, batch_size=self.batch_size, microbatch_size=self.microbatch_size, **start
        )
        return proposals

    def _until(
        self, proposals: Iterable[StageGraph], cost: CostModel, enough_s: float
    ) -> Iterator[StageGraph]:
        """Generate proposals up to the first whose step is short enough, where the search ends."""
        judge = Judge(ShortestStep(cost, self.schedules))
        judge.best_s = enough_s
        for proposal in proposals:
            yield proposal
            judge.consider([proposal], BUDGET.enough)
            if judge.best_s < enough_s:
                return

    def _judge(
        self, judge: Judge, improving: Search | None, proposals: Iterable[StageGraph]
    ) -> None:
        if self.start is not None and not self.start.shares_devices:
            # Before all others, so that every schedule of it is tried.
            judge.consider([self.start], BUDGET.simulation)
        if improving is not None:
            judge.consider(improving.likely(), BUDGET.likely, in_order=True)
        judge.consider(proposals, BUDGET.simulation)

    def _first_that_fits(self, cost: CostModel, proposals: Iterable[StageGraph]) -> Judge:
        """Return a judge of the first proposal that fits, after an interrupt before any result."""
        for proposal in proposals:
            judge = Judge(ShortestStep(cost, self.schedules))
            judge.consider([proposal])
            if judge.best is not None:
                return judge
        raise KeyboardInterrupt
