"""Which of many proposed stage graphs has the shortest step? Simulate as few of them as will do.

Two things keep that cheap:

- a step is at least what its busiest stage computes, plus the way to that stage and back from it. A
  proposal whose bound is above the best step so far is not simulated, and nothing is lost;
- with many micro-batches the middle of a step repeats itself. A long step is first judged by two
  short ones and the line through them, and simulated in full unless that is worse than the best by
  more than ``MARGIN``. That is a rule of thumb: it could pass over a best one by less than that.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from anabranch.cluster import GIB
from anabranch.cost import CostModel
from anabranch.errors import InfeasiblePlanError, ProfileError
from anabranch.planner.check import stage_bytes
from anabranch.planner.stages import StageGraph
from anabranch.schedule import rule_named
from anabranch.schedule.schedule import Schedule
from anabranch.simulator.bound import least_step_s
from anabranch.simulator.costs import ModelCosts
from anabranch.simulator.run import step_seconds

MARGIN = 0.02
"""How far the estimate of a long step may be off, as a share of it."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A proposal with the in-flight counts of one schedule."""

    graph: StageGraph
    schedule: str
    costs: ModelCosts
    least_s: float
    peak_bytes: float


class Judge:
    """Picks the proposal with the shortest simulated step that fits memory."""

    def __init__(self, cost: CostModel, schedules: Sequence[str]) -> None:
        self._cost = cost
        self._schedules = schedules

    def best(self, proposals: Iterable[StageGraph], planner: str) -> Candidate:
        """The winner; with equal steps the one with less memory.

        Raises:
            InfeasiblePlanError: if none fits; the message has the least memory that would do.
        """
        rejected: list[str | float] = []
        candidates = list(self._candidates(proposals, rejected))
        if not candidates:
            raise InfeasiblePlanError(self._why_none(rejected, planner))
        best, best_s = candidates[0], math.inf
        # Few micro-batches first: those steps are quick to simulate, and their results prune the
        # rest.
        for candidate in sorted(candidates, key=_num_actions):
            if candidate.least_s > best_s:
                continue
            if self._estimate(candidate, best_s) * (1 - MARGIN) > best_s:
                continue
            order = self._order(candidate.graph, candidate.schedule)
            seconds = step_seconds(candidate.graph, order, candidate.costs)
            tie = math.isclose(seconds, best_s, rel_tol=1e-9)
            if candidate.peak_bytes < best.peak_bytes if tie else seconds < best_s:
                best, best_s = candidate, min(seconds, best_s)
        return best

    def _order(self, graph: StageGraph, schedule: str) -> Schedule:
        return replace(rule_named(schedule).order(graph), slots=self._cost.receive_slots)

    def _candidates(
        self, proposals: Iterable[StageGraph], rejected: list[str | float]
    ) -> Iterator[Candidate]:
        """Proposals that fit; ``rejected`` gets the bytes, or the reason, of those that do not."""
        for proposal in proposals:
            seen: list[StageGraph] = []
            for schedule in self._schedules:
                graph = rule_named(schedule).warm_up(proposal)
                if graph in seen:
                    continue
                seen.append(graph)
                peak = max(
                    stage_bytes(graph, self._cost, s, in_flight=stage.in_flight)
                    for s, stage in enumerate(graph.stages)
                )
                if peak > self._cost.cluster.memory_bytes:
                    rejected.append(peak)
                    continue
                costs = ModelCosts(graph, self._cost)
                try:
                    least = least_step_s(graph, costs)
                except ProfileError as error:
                    rejected.append(str(error))
                    continue
                yield Candidate(graph, schedule, costs, least, peak)

    def _estimate(self, candidate: Candidate, best_s: float) -> float:
        """Step seconds by the line through two short batches; 0 if the batch itself is short."""
        graph = candidate.graph
        unit = math.lcm(*(stage.k * stage.microbatch_size for stage in graph.stages))
        held = max(stage.in_flight * stage.microbatch_size for stage in graph.stages)
        first = 2 * -(-held // unit) + 8
        second = first + 8
        if not math.isfinite(best_s) or graph.batch_size < 2 * (first + second) * unit:
            return 0.0
        times = []
        for units in (first, second):
            short = replace(graph, batch_size=units * unit)
            times.append(
                step_seconds(short, self._order(short, candidate.schedule), candidate.costs)
            )
        slope = (times[1] - times[0]) / (second - first)
        return times[1] + slope * (graph.batch_size / unit - second)

    def _why_none(self, rejected: Sequence[str | float], planner: str) -> str:
        reasons = [reason for reason in rejected if isinstance(reason, str)]
        sizes = [size for size in rejected if not isinstance(size, str)]
        if not rejected:
            return f"planner {planner} proposes nothing for {self._cost.cluster.name}"
        if not sizes:
            return f"no proposal of planner {planner} can be priced: {reasons[0]}"
        return (
            f"none of the {len(sizes)} proposals of planner {planner} fits "
            f"{self._cost.cluster.name}: the smallest needs {min(sizes) / GIB:.2f} GiB on a "
            f"device, which has {self._cost.cluster.memory_bytes / GIB:.2f} GiB; use devices with "
            "that much memory, more devices, a smaller micro-batch or an optimizer with less state"
        )


def _num_actions(candidate: Candidate) -> int:
    graph = candidate.graph
    return sum(graph.num_microbatches(s) * stage.replicas for s, stage in enumerate(graph.stages))
