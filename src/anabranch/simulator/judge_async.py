"""Which of many proposed stage graphs takes the least time per mini-batch without a flush?

What counts is the period of the full pipeline, PipeDream's slowest stage with its messages and the
sum of its gradients. Many plans have the same one: the slowest stage decides it, however many
stages come after it. Of plans whose periods are equal (within ``EQUAL``) the one with the
shortest longest way to the sink is the best, because its weights are the least stale; then the one
that recomputes less; then the one with less memory.

A proposal may have any number of samples per batch: what it is asked for is its stages, devices and
micro-batches.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from anabranch.cluster import GIB
from anabranch.cost import CostModel
from anabranch.errors import InfeasiblePlanError, InvalidPlanError, PolicyError, ProfileError
from anabranch.plans.check import stage_bytes
from anabranch.plans.stages import StageGraph
from anabranch.schedule import endless
from anabranch.simulator import stream
from anabranch.simulator.costs import ModelCosts
from anabranch.simulator.staleness import versions_of
from anabranch.weights import WeightPolicy

EQUAL = 1e-3
"""Periods that differ by less, as a share, are the same: profiles are not that exact."""


@dataclass(frozen=True, slots=True)
class AsyncCandidate:
    """A proposal as it would run.

    Attributes:
        proposal: what the planner proposed.
        graph: its stages for one mini-batch, with their in-flight counts.
        versions: per stage, of its weights.
        peak_bytes: most bytes on any device.
        steady: the simulator's figures.
    """

    proposal: StageGraph
    graph: StageGraph
    versions: tuple[int, ...]
    peak_bytes: float
    steady: stream.Steady


class AsyncJudge:
    """Keeps the proposals with the shortest periods that fit memory.

    Args:
        cost: prices the operators on the cluster.
        policy: says how many versions of the weights are held.
        batch_size: samples of one mini-batch.
        last_update: see ``weights.versions_held``.

    Attributes:
        best: the winner so far.
        simulated: micro-batches times devices simulated so far, a measure of the work done.
        too_big: bytes that each proposal needed that does not fit, on its fullest device.
    """

    def __init__(
        self,
        cost: CostModel,
        policy: WeightPolicy,
        batch_size: int,
        *,
        last_update: bool = False,
    ) -> None:
        self.best: AsyncCandidate | None = None
        self.simulated = 0
        self.too_big: list[float] = []
        self._cost = cost
        self._policy = policy
        self._last_update = last_update
        self._batch_size = batch_size
        self._seen: set[StageGraph] = set()
        self._found: list[AsyncCandidate] = []
        self._least_s = math.inf
        self._refused: list[str] = []

    def consider(self, proposals: Iterable[StageGraph], allowed: float = math.inf) -> bool:
        """Judge proposals, each only once; whether one of them is the best now.

        An interrupt leaves ``best`` as good as what was simulated until then.

        Args:
            proposals: stage graphs.
            allowed: no further simulation once ``simulated`` has come to this.
        """
        before = self.best
        for proposal in proposals:
            if self.simulated >= allowed:
                break
            graph = replace(proposal, batch_size=self._batch_size)
            if graph not in self._seen:
                self._seen.add(graph)
                self._consider(proposal, graph)
        return self.best is not before

    def _consider(self, proposal: StageGraph, graph: StageGraph) -> None:
        try:
            graph = endless.warm_up(graph)
            versions = versions_of(graph, self._policy, last_update=self._last_update)
            costs = ModelCosts(graph, self._cost, versions)
            least_s = stream.least_period_s(graph, costs)
        except (InvalidPlanError, PolicyError, ProfileError) as error:
            self._refused.append(str(error))
            return
        peak = max(
            stage_bytes(graph, self._cost, s, in_flight=each.in_flight, versions=versions[s])
            for s, each in enumerate(graph.stages)
        )
        if peak > self._cost.cluster.memory_bytes:
            self.too_big.append(peak)
            return
        if least_s > self._least_s * (1 + EQUAL):
            return
        steady = stream.steady(graph, costs, slots=self._cost.receive_slots)
        self.simulated += steady.simulated * max(map(graph.num_microbatches, range(len(graph))))
        self._found.append(AsyncCandidate(proposal, graph, versions, peak, steady))
        self._least_s = min(self._least_s, steady.period_s)
        limit = self._least_s * (1 + EQUAL)
        self._found = [each for each in self._found if each.steady.period_s <= limit]
        self.best = min(self._found, key=_rank)

    def winner(self, planner: str) -> AsyncCandidate:
        """The best.

        Raises:
            InfeasiblePlanError: if no proposal fits or suits the policy; the message has the least
                memory that would do.
        """
        if self.best is None:
            raise InfeasiblePlanError(self._why_none(planner))
        return self.best

    def _why_none(self, planner: str) -> str:
        name, cluster = self._policy.name, self._cost.cluster
        if self.too_big:
            return (
                f"none of the {len(self.too_big)} proposals of planner {planner} fits "
                f"{cluster.name} with the weight versions of policy {name}: the smallest needs "
                f"{min(self.too_big) / GIB:.2f} GiB on a device, which has "
                f"{cluster.memory_bytes / GIB:.2f} GiB; use a policy that holds fewer versions "
                "(2bw, pipeoptim), a smaller batch, more devices or devices with that much memory, "
                "or an optimizer with less state"
            )
        if self._refused:
            # The smallest micro-batches are asked for last: a limit on their number is tightest.
            return f"no proposal of planner {planner} suits policy {name}: {self._refused[-1]}"
        return f"planner {planner} proposes nothing for {cluster.name}"


def _rank(candidate: AsyncCandidate) -> tuple[int, int, float, float]:
    graph = candidate.graph
    recomputing = sum(stage.recompute for stage in graph.stages)
    return graph.depth, recomputing, candidate.peak_bytes, candidate.steady.period_s


def microbatch_sizes(batch_size: int, policy: WeightPolicy, most: int) -> Sequence[int]:
    """Samples per micro-batch that a policy lets one choose from, the largest first.

    Of many micro-batches these are about 1, 2, 4 .. times as many, whole fractions of the batch.

    Args:
        batch_size: samples of one mini-batch.
        policy: one micro-batch per mini-batch, or many.
        most: devices; a pipeline of that many stages is the deepest there is.
    """
    if not policy.microbatches:
        return [batch_size]
    divisors = [m for m in range(1, batch_size + 1) if batch_size % m == 0]
    wanted = [1 << i for i in range((4 * most).bit_length())]
    counts = {next(m for m in divisors if m >= min(w, batch_size)) for w in wanted}
    return [batch_size // m for m in sorted(counts)]
