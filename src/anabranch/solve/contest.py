"""A contest of proposals in every way to run them: with optimizer state that replicas share or not,
with whole or split backwards, and in the end with several stages on each device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from anabranch.cost import CostModel
from anabranch.planner.auto.search import Search
from anabranch.planner.base import RunOptions
from anabranch.plans.stages import StageGraph
from anabranch.schedule import SPLIT_BACKWARDS
from anabranch.simulator.judge import Judge
from anabranch.simulator.objective import ScheduledProposal, ShortestStep
from anabranch.solve.schedule_choice import (
    AUTO,
    LOOP_SCHEDULES,
    best_loop,
    least_bounds,
    split_backwards,
)
from anabranch.solve.settings import SETTINGS, SearchBudget


def improve(
    judge: Judge, near: Callable[[StageGraph], Iterable[StageGraph]], budget: SearchBudget
) -> None:
    """Judge neighbours of the best plan until several rounds in a row find nothing better."""
    allowed, failures = judge.simulated + budget.improvement, 0
    while judge.best is not None and failures < budget.patience and judge.simulated < allowed:
        better = judge.consider(near(judge.best.proposal), allowed)
        failures = 0 if better else failures + 1


class Contest:
    """Judges of whole backwards without and with shared state, and the best of all.

    Attributes:
        cost: prices of the best: ``shard_optimizer`` says whether replicas share the state.
        choice: ways to run a proposal that may be chosen.
        is_over: whether the search proposes nothing more.

    Args:
        schedules: schedules of whole backwards; backwards may be split only with ``AUTO``.
        may_share: whether replicas may share the optimizer's state though ``cost`` does not say so.
        improving: the search behind the proposals, if it can be asked for their neighbours.
    """

    def __init__(
        self,
        cost: CostModel,
        schedules: tuple[str, ...],
        improving: Search | None,
        budget: SearchBudget,
        *,
        may_share: bool,
    ) -> None:
        self.cost, self.budget, self._schedules = cost, budget, schedules
        self.choice = RunOptions(may_share, schedules == AUTO)
        self._improving = improving
        costs = [cost, replace(cost, shard_optimizer=True)] if may_share else [cost]
        self._costs = {priced.shard_optimizer: priced for priced in costs}
        self._judges = {
            shared: Judge(ShortestStep(priced, schedules)) for shared, priced in self._costs.items()
        }
        self._split: tuple[float, ScheduledProposal] | None = None
        self.is_over = False

    @property
    def judge(self) -> Judge:
        """The judge of whole backwards at the prices of the best."""
        return self._judges[self.cost.shard_optimizer]

    @judge.setter
    def judge(self, judge: Judge) -> None:
        self._judges[self.cost.shard_optimizer] = judge

    @property
    def best_s(self) -> float:
        """Seconds of the best; infinite while nothing is simulated."""
        return self._split[0] if self._split else self.judge.best_s

    def winner(self, planner: str) -> ScheduledProposal:
        """Return the best proposal; an error if none can run or fits."""
        return self._split[1] if self._split else self.judge.winner(planner)

    def share(self) -> None:
        """Judge proposals again with shared optimizer state, the ones that may gain by it."""
        if not self.choice.shared:
            return
        plain, sharing = self._judges[False], self._judges[True]
        sharing.best_s = min(sharing.best_s, plain.best_s * (1 - SETTINGS.worth_sharing))
        limit = sharing.best_s
        near: Iterable[StageGraph] = filter(_is_replicated, (*plain.seconds(), *plain.unfit))
        if self._improving is not None:
            promising = self._improving.promising(near, RunOptions(shared=True), limit)
            half = SETTINGS.share_proposals // 2
            ranked = [*filter(_is_replicated, plain.ranked())]
            near = [*dict.fromkeys([*promising[:half], *ranked[:half], *promising])]
            near = near[: SETTINGS.share_proposals]
        sharing.consider(near, self.budget.simulation, in_order=self._improving is not None)
        if sharing.best_s < limit:
            self.cost = self._costs[True]

    def improve(self) -> None:
        """Judge neighbours of the best, run in the same way, as long as that finds better ones."""
        if self._improving is None:
            return
        search, runs, failures = self._improving, self._runs, 0
        if self._split is None:
            improve(self.judge, lambda graph: search.near(graph, runs), self.budget)
        while self._split and failures < self.budget.patience:
            _, best = self._split
            near = search.near(best.proposal, runs)
            better = self._split_some(near, self.cost.shard_optimizer, (best.schedule,))
            failures = 0 if better else failures + 1

    def split(self) -> None:
        """Try the most promising proposals with split backwards."""
        for shared in self._judges if self.choice.split else ():
            judge = self._judges[shared]
            ranked = judge.ranked(SETTINGS.split_near)
            if self._improving is not None:
                runs = RunOptions(shared, split=True)
                promising = [*self._improving.promising(judge.seconds(), runs)]
                half = SETTINGS.split_proposals // 2
                ranked = [*dict.fromkeys([*promising[:half], *ranked])]
            self._split_some(ranked, shared)

    def search_on(self) -> None:
        """Let the search go on from the best plan, and judge its proposals and their neighbours."""
        self.is_over = True
        if self._improving is None or self.best_s == math.inf:
            return
        best = self.winner("").proposal
        proposals = [*self._improving.again(best, self._runs, self.choice)]
        self.is_over = not proposals
        for shared, judge in self._judges.items():
            judge.best_s = min(judge.best_s, self.best_s)
            own = [(graph, runs.split) for graph, runs in proposals if runs.shared == shared]
            whole = [graph for graph, is_split in own if not is_split]
            if judge.consider(whole, in_order=True) and judge.best_s < self.best_s:
                self.cost, self._split = self._costs[shared], None
            if self.choice.split:
                as_split = [graph for graph, is_split in own if is_split]
                ranked = [graph for graph in judge.ranked(SETTINGS.split_near) if graph in whole]
                near = [*dict.fromkeys([*as_split, *ranked])][: SETTINGS.split_proposals // 2]
                self._split_some(near, shared)
        if self.winner("").proposal != best:
            self.improve()

    def loop(self, start: StageGraph | None = None) -> None:
        """Judge plans with several stages on a device, which have to gain ``loop_gain``: rows that
        pass the devices several times, and branches whose join shares a device with one of them.

        Args:
            start: stages of a plan to begin with, several on a device; judged in any case.
        """
        if start is not None:
            self._judge_loops([start], self.best_s)
        if self._improving is not None and self.best_s < math.inf:
            limit = self.best_s * (1 - SETTINGS.loop_gain)
            recompute = any(stage.recompute for stage in self.winner("").graph.stages)
            graphs = [*self._improving.loops(limit, recompute=False)]
            graphs += self._improving.loops(limit, recompute=True) if recompute else ()
            joined = self._improving.branches(limit)
            for some in (graphs, joined):  # apart: the kind that is shorter may improve less
                self._judge_loops(some, limit)

    def _judge_loops(self, graphs: Sequence[StageGraph], limit: float) -> None:
        """Judge stage graphs whose devices have several stages, then neighbours of the best."""
        ways: Sequence[tuple[str, ...]] = LOOP_SCHEDULES if self.choice.split else [self._schedules]
        best, costs, passes = None, [*self._costs.values()], SETTINGS.loop_passes
        best_cost = costs[0]
        for turn in range(SETTINGS.loop_turns):
            before = best
            if len(graphs) > SETTINGS.most_loops:  # by the prices with least memory; bounds agree
                graphs = [*least_bounds(costs[-1], graphs, limit, ways[-1])]
            for cost in costs:
                better, steps_s = best_loop(cost, graphs, limit, ways, passes)
                if better is not None:
                    best = better
                    best_cost, limit = cost, best[0] * (1 - SETTINGS.worth_sharing * (not turn))
                # With shared state only those that may gain, and not far behind without it.
                far_s = SETTINGS.schedules_near * limit
                near = (g for g in graphs if not far_s < steps_s.get(g, 0.0) < math.inf)
                graphs = [*filter(_is_replicated, near)]
            if best is None or best is before or self._improving is None:
                break
            costs, ways, limit = [best_cost], [(best[1].schedule,)], best[0]
            graphs = [*self._improving.near_loops(best[1].proposal)]
            passes = SETTINGS.near_passes
        if best is not None and best[0] < self.best_s:
            self._split, self.cost = best, best_cost

    @property
    def is_misled(self) -> bool:
        """True if the search has estimated the best as far quicker than its simulation."""
        if self._improving is None or not self.is_over or self.best_s == math.inf:
            return False
        best = self.winner("").proposal
        return self._improving.is_misled(best, self._runs, self.best_s)

    @property
    def _runs(self) -> RunOptions:
        return RunOptions(self.cost.shard_optimizer, self._split is not None)

    def _split_some(
        self,
        graphs: Iterable[StageGraph],
        shared: bool,
        schedules: Iterable[str] = sorted(SPLIT_BACKWARDS),
    ) -> bool:
        """Try proposals with split backwards; return True if one of them is the best now."""
        cost = self._costs[shared]
        split = split_backwards(self._judges[shared], cost, graphs, self.best_s, tuple(schedules))
        if split is not None:
            self._split, self.cost = split, cost
        return split is not None


def _is_replicated(graph: StageGraph) -> bool:
    return any(stage.replicas > 1 for stage in graph.stages)
