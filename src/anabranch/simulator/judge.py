"""Which of many proposed stage graphs has the shortest step? Simulate as little of them as will do.

- A step is at least what its busiest stage computes, plus the way to that stage and back from it. A
  proposal whose bound is above the best step so far is not simulated, and nothing is lost.
- With many micro-batches the middle of a step repeats itself: a long step is a short one and many
  periods (``simulator.steady``). Where it does so only roughly, a step that is more than ``MARGIN``
  above the best by its short ones is not simulated in full.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from anabranch.cluster import GIB
from anabranch.cost import CostModel
from anabranch.errors import InfeasiblePlanError, ProfileError
from anabranch.plans.check import stage_bytes
from anabranch.plans.stages import StageGraph
from anabranch.schedule import compute_order, rule_named
from anabranch.schedule.schedule import Schedule
from anabranch.simulator.bound import least_step_s
from anabranch.simulator.costs import ModelCosts
from anabranch.simulator.run import step_seconds
from anabranch.simulator.steady import estimate_step_s

MARGIN = 0.005
"""How far a step without a period may be off its estimate, as a share of it: a rule of thumb, by
which a best one could be passed over."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A proposal with the in-flight counts of one schedule."""

    proposal: StageGraph
    graph: StageGraph
    schedule: str
    costs: ModelCosts
    least_s: float
    peak_bytes: float


class Judge:
    """Keeps the proposal with the shortest simulated step that fits memory.

    Args:
        cost: prices the operators on the cluster.
        schedules: keys of ``schedule.SCHEDULES`` to try with every proposal, least memory first.

    Attributes:
        best: the winner so far; with equal steps the one that recomputes less, then the one with
            less memory.
        best_s: its step.
        simulated: micro-batches times devices simulated so far, a measure of the work done, those
            of the short steps that it takes to see that a step repeats itself.
    """

    def __init__(self, cost: CostModel, schedules: Sequence[str]) -> None:
        self.best: Candidate | None = None
        self.best_s = math.inf
        self.simulated = 0
        self._cost = cost
        self._schedules = schedules
        self._seen: set[StageGraph] = set()
        self._steps: dict[StageGraph, float] = {}
        self._least: dict[StageGraph, float] = {}
        self._rejected: list[str | float] = []

    def consider(self, proposals: Iterable[StageGraph], allowed: float = math.inf) -> bool:
        """Judge proposals, each only once; whether one of them is the best now.

        An interrupt leaves ``best`` as good as what was simulated until then.

        Args:
            proposals: stage graphs.
            allowed: no further simulation once ``simulated`` has come to this.
        """
        before = self.best
        candidates = sorted(self._candidates(proposals), key=_num_actions)
        if self.best is None and candidates:
            self.best = candidates[0]
        # Few micro-batches first: those steps are quick to simulate, and their results prune the
        # rest.
        for candidate in candidates:
            if self.simulated < allowed:
                self._consider(candidate)
        return self.best is not before

    def _consider(self, candidate: Candidate) -> None:
        proposal = candidate.proposal
        if candidate.least_s > self.best_s:
            self._least[proposal] = min(candidate.least_s, self._least.get(proposal, math.inf))
            return
        seconds, sure = self._seconds(candidate)
        self._steps[proposal] = min(seconds, self._steps.get(proposal, math.inf))
        if not sure:
            return
        if self._is_better(candidate, seconds):
            self.best, self.best_s = candidate, min(seconds, self.best_s)

    def ranked(self, factor: float) -> list[StageGraph]:
        """Proposals whose steps may be within a factor of the best, the shortest first.

        Those that were not simulated come last, by what they take at least: that says little.
        """
        limit = factor * self.best_s
        return [
            graph
            for known in (self._steps, self._least)
            for graph, seconds in sorted(known.items(), key=lambda each: each[1])
            if seconds <= limit and (known is self._steps or graph not in self._steps)
        ]

    def alone(self, proposal: StageGraph) -> Judge:
        """A judge of what is better than this proposal, whatever else there is."""
        judge = Judge(self._cost, self._schedules)
        judge.consider([proposal])
        return judge

    def join(self, other: Judge) -> None:
        """Take over what another judge has found."""
        self.simulated += other.simulated
        best = other.best
        if best is not None and self.best is not None and self._is_better(best, other.best_s):
            self.best, self.best_s = best, min(other.best_s, self.best_s)

    def _is_better(self, candidate: Candidate, seconds: float) -> bool:
        assert self.best is not None, "the first candidate is the best until another is better"
        if math.isclose(seconds, self.best_s, rel_tol=1e-9):
            return _burden(candidate) < _burden(self.best)
        return seconds < self.best_s

    def winner(self, planner: str) -> Candidate:
        """The best.

        Raises:
            InfeasiblePlanError: if no proposal fits; the message has the least memory that would
                do.
        """
        if self.best is None:
            raise InfeasiblePlanError(self._why_none(planner))
        return self.best

    def _candidates(self, proposals: Iterable[StageGraph]) -> Iterator[Candidate]:
        """Proposals that fit; of those that do not, the bytes or the reason are remembered."""
        for proposal in proposals:
            if proposal in self._seen:
                continue
            self._seen.add(proposal)
            warmed: list[StageGraph] = []
            for schedule in self._schedules:
                graph = rule_named(schedule).warm_up(proposal, partial(self._room, proposal))
                if graph in warmed:
                    continue
                warmed.append(graph)
                candidate = self._candidate(proposal, graph, schedule)
                if candidate is not None:
                    yield candidate

    def _candidate(
        self, proposal: StageGraph, graph: StageGraph, schedule: str
    ) -> Candidate | None:
        peak = max(
            stage_bytes(graph, self._cost, s, in_flight=stage.in_flight)
            for s, stage in enumerate(graph.stages)
        )
        if peak > self._cost.cluster.memory_bytes:
            self._rejected.append(peak)
            return None
        costs = ModelCosts(graph, self._cost)
        try:
            least = least_step_s(graph, costs)
        except ProfileError as error:
            self._rejected.append(str(error))
            return None
        return Candidate(proposal, graph, schedule, costs, least, peak)

    def _room(self, graph: StageGraph, s: int) -> int:
        """Micro-batches in flight that the memory of a stage's devices holds."""
        none, one = (stage_bytes(graph, self._cost, s, in_flight=n) for n in (0, 1))
        free = self._cost.cluster.memory_bytes - none
        return int(free // (one - none)) if one > none else graph.num_microbatches(s)

    def _seconds(self, candidate: Candidate) -> tuple[float, bool]:
        """The step of a candidate; roughly, and False, if it is all but sure to be longer than the
        best.
        """
        graph, schedule = candidate.graph, candidate.schedule

        def order_for(short: StageGraph) -> Schedule:
            self.simulated += _work(short)
            return compute_order(short, schedule, slots=self._cost.receive_slots)

        steady = estimate_step_s(graph, order_for, candidate.costs, roughly=True)
        if steady is not None:
            if steady.periodic:
                return steady.seconds, True
            if steady.seconds * (1 - MARGIN) > self.best_s:
                return steady.seconds, False
        return step_seconds(graph, order_for(graph), candidate.costs), True

    def _why_none(self, planner: str) -> str:
        reasons = [reason for reason in self._rejected if isinstance(reason, str)]
        sizes = [size for size in self._rejected if not isinstance(size, str)]
        if not self._rejected:
            return f"planner {planner} proposes nothing for {self._cost.cluster.name}"
        if not sizes:
            return f"no proposal of planner {planner} can be priced: {reasons[0]}"
        return (
            f"none of the {len(sizes)} proposals of planner {planner} fits "
            f"{self._cost.cluster.name}: the smallest needs {min(sizes) / GIB:.2f} GiB on a "
            f"device, which has {self._cost.cluster.memory_bytes / GIB:.2f} GiB; use devices with "
            "that much memory, more devices, a smaller micro-batch or an optimizer with less state"
        )


def _work(graph: StageGraph) -> int:
    return sum(graph.num_microbatches(s) * len(each.devices) for s, each in enumerate(graph.stages))


def _burden(candidate: Candidate) -> tuple[int, float]:
    """What decides between equal steps: nothing is computed twice for memory that is not needed."""
    return sum(stage.recompute for stage in candidate.graph.stages), candidate.peak_bytes


def _num_actions(candidate: Candidate) -> int:
    graph = candidate.graph
    return sum(graph.num_microbatches(s) * stage.replicas for s, stage in enumerate(graph.stages))
