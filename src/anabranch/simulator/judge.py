"""A judge of proposed stage graphs, which simulates no more of them than it has to.

- A step takes at least the compute of its busiest stage, plus the way to that stage and back from
  it; a period at least the compute and the sums of the busiest device. Proposals are simulated by
  rising bounds, up to the first whose bound is above the best so far. That loses nothing.
- A proposal that is well above the best under one warm-up is not simulated under other warm-ups
  (``warm_up_gain``). That may lose a plan: of random drafts one in fourteen is more than 1 %
  shorter under the minimal warm-up than under the deep one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from anabranch.errors import InfeasiblePlanError, InvalidPlanError, PolicyError, ProfileError
from anabranch.plans.plan import memory_text
from anabranch.plans.stages import StageGraph
from anabranch.simulator.objective import Objective, ScheduledProposal


class Judge:
    """Keeps the proposal that is best by an objective and fits memory.

    Attributes:
        best: the winner so far; while none has been simulated, the first that fits.
        simulated: micro-batches times devices simulated so far, a measure of the work done.
        too_big: bytes on the fullest device of each run that does not fit.
        unfit: proposals of the runs in ``too_big``.
    """

    def __init__(self, objective: Objective) -> None:
        self.best: ScheduledProposal | None = None
        self.best_s = math.inf
        self.simulated = 0
        self.too_big: list[float] = []
        self.unfit: list[StageGraph] = []
        self._objective = objective
        self._refused: list[str] = []
        self._seen: set[StageGraph] = set()
        self._ran: set[StageGraph] = set()
        self._equals: list[tuple[ScheduledProposal, float]] = []
        self._seconds: dict[StageGraph, float] = {}
        self._least_s: dict[StageGraph, float] = {}

    def consider(
        self, proposals: Iterable[StageGraph], allowed: float = math.inf, *, in_order: bool = False
    ) -> bool:
        """Judge proposals until ``simulated`` comes to ``allowed``; return True if one of them has
        been simulated and is the best now.

        Args:
            in_order: judge the proposals in their order, as the likely ones come first and prune
                the rest. Otherwise the ones with the least bounds come first.
        """
        before = self.best
        new = [proposal for proposal in dict.fromkeys(proposals) if proposal not in self._seen]
        for some in ([proposal] for proposal in new) if in_order else [new]:
            if self.best is not None and self.simulated >= allowed:
                break
            # Runs of one proposal have equal bounds; of these the deepest warm-up comes first.
            candidates = [c for proposal in some for c in reversed([*self._candidates(proposal)])]
            if self.best is None and candidates:
                self.best = min(candidates, key=lambda candidate: candidate.least_s)
            for candidate in sorted(candidates, key=lambda candidate: candidate.least_s):
                if self.simulated < allowed:
                    self._consider(candidate)
        return self.best is not before and bool(self._equals)

    def _consider(self, candidate: ScheduledProposal) -> None:
        proposal = candidate.proposal
        known_s = self._seconds.get(proposal, 0.0)
        limit = self.best_s * (1 + self._objective.warm_up_gain)
        if known_s > limit or self._is_longer(proposal, candidate.least_s):
            return
        seconds, work = self._objective.measure(candidate)
        self.simulated += work
        self._seconds[proposal] = min(seconds, self._seconds.get(proposal, math.inf))
        self._take([(candidate, seconds)])

    def _is_longer(self, proposal: StageGraph, least_s: float) -> bool:
        """Return True if a proposal with this lower bound is longer than the best."""
        if least_s <= self._limit_s:
            return False
        self._least_s[proposal] = min(least_s, self._least_s.get(proposal, math.inf))
        return True

    @property
    def _limit_s(self) -> float:
        """Most seconds of a proposal that is as good as the best."""
        return self.best_s * (1 + self._objective.equal)

    def _take(self, simulated: Iterable[tuple[ScheduledProposal, float]]) -> None:
        simulated = [*self._equals, *simulated]
        # ``best_s`` may have begun as a limit that no proposal has reached.
        self.best_s = min(self.best_s, *(seconds for _, seconds in simulated))
        self._equals = [(c, seconds) for c, seconds in simulated if seconds <= self._limit_s]
        if self._equals:
            self.best, _ = min(self._equals, key=lambda simulated: self._objective.rank(*simulated))

    def seconds(self) -> dict[StageGraph, float]:
        """Return the seconds of the proposals that fit: simulated, or else a lower bound."""
        return self._least_s | self._seconds

    def ranked(self, factor: float = 2.0) -> list[StageGraph]:
        """Return the proposals whose seconds may be within a factor of the best: first those that
        were simulated, then those with a bound only, each by ascending seconds.
        """
        limit, known = factor * self.best_s, self.seconds()
        near = (proposal for proposal in known if known[proposal] <= limit)
        return sorted(near, key=lambda proposal: (proposal not in self._seconds, known[proposal]))

    def winner(self, planner: str) -> ScheduledProposal:
        """Return the best proposal.

        Raises:
            InfeasiblePlanError: if no proposal can run or fits; the message has the least memory
                that would suffice.
        """
        if self.best is not None:
            return self.best
        cluster, objective = self._objective.cost.cluster, self._objective
        if self.too_big:
            raise InfeasiblePlanError(
                f"none of the {len(self.too_big)} proposals of planner {planner} fits "
                f"{cluster.name}{objective.held}: the smallest needs "
                f"{memory_text(min(self.too_big))} on a device, which has "
                f"{memory_text(cluster.memory_bytes)}; {objective.remedy}"
            )
        if self._refused:
            # The smallest micro-batches are asked for last: a limit on their number is tightest.
            raise InfeasiblePlanError(
                f"no proposal of planner {planner} {objective.suits}: {self._refused[-1]}"
            )
        raise InfeasiblePlanError(f"planner {planner} proposes nothing for {cluster.name}")

    def _candidates(self, proposal: StageGraph) -> Iterator[ScheduledProposal]:
        """Generate the ways to run a proposal that fit in memory and may be as good as the best.
        The bytes of runs that do not fit are kept, and the reasons of refusals.
        """
        self._seen.add(proposal)
        objective, memory_bytes = self._objective, self._objective.cost.cluster.memory_bytes
        try:
            costs = objective.prices(proposal)
            least_s = objective.least_s(costs, self._limit_s)
            if self._is_longer(proposal, least_s):
                return
            for graph, schedule in objective.runs(costs):
                if graph in self._ran:
                    continue
                self._ran.add(graph)
                peak = objective.peak_bytes(costs, graph, schedule)
                if peak > memory_bytes:
                    self.too_big.append(peak)
                    self.unfit.append(proposal)
                    continue
                yield ScheduledProposal(proposal, graph, schedule, costs, least_s, peak)
        except (InvalidPlanError, PolicyError, ProfileError) as error:
            self._refused.append(str(error))
