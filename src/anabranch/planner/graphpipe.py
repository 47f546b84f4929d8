"""GraphPipe's partitioner: stages that form a graph, so that branches run side by side.

"GraphPipe: Improving Performance and Scalability of DNN Training with Graph Pipeline Parallelism",
sections 3 to 5, in its default mode: synchronous 1F1B, one micro-batch size for all stages,
searched over powers of two, as are the replicas; memory as a constraint; the longest period
minimised by bisection, a dynamic programme over the series-parallel structure for each bound.

Where we differ, or the paper is silent:

- ``partitioner.chain_programme`` asks for the fewest devices per (cut, height) instead of
  enumerating device splits and schedule configurations; with one micro-batch size and k = 1 a
  configuration is a height (Table 2).
- Small graphs and those that are not series-parallel are searched over all partitions
  (``partitioner.exact``); only what is too large for that gets some order added
  (``graph.series_parallel``).
- Transfers and all-reduces are part of the period (``toolkit.prices``).
- The least period does not give the least step, so shallower plans at looser bounds are candidates
  too (``partitioner.period_search``), and stages that are runs of the model in one order; where
  devices share processor cores, also stages that wait for the one before them (``Sequential``).
- A stage recomputes if it does not fit otherwise, or if it lacks the memory for a deep warm-up and
  the simulated step is shorter with recomputation; of equal steps the one that recomputes less is
  kept (``simulator.judge``).
- A parameter tied across stages is summed over all devices of all its holders. The search does not
  know that; the estimate does, and ``partitioner.polish`` tries to bring the holders together.

What a stage may be:

1. a contiguous run of items of a series, where an item is an operator or a whole parallel block;
2. a run of whole branches of a block, in the order of the block;
3. a run of items right behind a block, with the last operators (or all) of any of its branches;
4. a run of items right before a block, with the first operators (or all) of any of its branches,
   if the block ends at a boundary of stages.

The period is the least of such stages, up to ``tolerance``. On random series-parallel graphs of up
to 7 operators it is the least of all partitions in 97 of 100; the worst was 43% above. Where
traffic, all-reduce or memory of a stage of kind 3 or 4 is tight, only the share with the least
compute is looked at; kind 4 tries at most ``partitioner.limits.SEARCH.heads`` cuts per branch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from anabranch.cost import CostModel
from anabranch.planner.base import require_options
from anabranch.planner.data_parallel import data_parallel
from anabranch.planner.partitioner.chain_programme import on_fewest_devices
from anabranch.planner.partitioner.chains import Chain, build
from anabranch.planner.partitioner.exact.candidates import with_exact
from anabranch.planner.partitioner.period_search import best, in_a_row
from anabranch.planner.partitioner.polish.polisher import Polisher
from anabranch.planner.sequential import Sequential
from anabranch.planner.toolkit.assemble import Candidate
from anabranch.planner.toolkit.infeasible import explain, require_sizes
from anabranch.planner.toolkit.problem import Problem
from anabranch.plans.edges import edge_values
from anabranch.plans.stages import StageGraph

MOST_OPERATORS = 24
"""Models of up to so many operators get the proposals of ``Sequential`` as well."""


@dataclass(frozen=True)
class GraphPipe:
    """Dynamic programme over the series-parallel structure of the model.

    Attributes:
        max_replicas: replicas per stage at most. None: no limit.
        candidates: stage graphs to propose at most.
        tolerance: relative distance to the least period at which its search ends.
        recompute: stages may run their forward again in the backward where memory is short.
    """

    max_replicas: int | None = None
    candidates: int = 20
    tolerance: float = 2e-3
    recompute: bool = True

    schedules: ClassVar[tuple[str, ...]] = ("1f1b",)

    def __post_init__(self) -> None:
        require_options("graphpipe", self, max_replicas=1, candidates=1, tolerance=0)

    def __call__(
        self, cost: CostModel, *, batch_size: int, microbatch_size: int | None = None
    ) -> Iterator[StageGraph]:
        """Propose stage graphs: some as they are found, then the least estimated step first.

        See ``planner.base``.

        Raises:
            InfeasiblePlanError: if nothing fits; the message says what would.
        """
        problem = self.problem(cost, batch_size)
        require_sizes(cost, batch_size, microbatch_size, problem.most_replicas)
        return self._propose(problem, microbatch_size)

    def problem(self, cost: CostModel, batch_size: int) -> Problem:
        """What is searched."""
        return Problem(
            cost,
            batch_size,
            self.max_replicas,
            recompute=self.recompute,
            tolerance=max(self.tolerance, 1e-9),
        )

    def _propose(self, problem: Problem, microbatch_size: int | None) -> Iterator[StageGraph]:
        whole = list(data_parallel(problem, microbatch_size))
        known = min(whole, key=lambda candidate: candidate.step_s, default=None)
        if known is not None:
            yield known.graph
        known_s = known.step_s if known is not None else float("inf")
        chain = build(problem.cost, problem.tree)
        found: list[Candidate] = []
        for candidate in self._searched(problem, chain, microbatch_size, known_s, found):
            if candidate.step_s < known_s:
                known_s = candidate.step_s
                yield candidate.graph
        ranked = best(found, self.candidates, always=whole)
        if not ranked:
            raise explain(problem, microbatch_size, on_fewest_devices(chain))
        # The paper's own objective: its best plan is always among those that are simulated.
        ranked.append(
            min([*found, *whole], key=lambda candidate: (candidate.period_s, candidate.step_s))
        )
        ranked += self._rows(problem, microbatch_size, ranked[0].graph)
        yield from dict.fromkeys(candidate.graph for candidate in ranked)

    @staticmethod
    def _searched(
        problem: Problem,
        chain: Chain,
        microbatch_size: int | None,
        known_s: float,
        found: list[Candidate],
    ) -> Iterator[Candidate]:
        """All candidates but data parallelism; they are in ``found`` as well."""
        searches = [with_exact(problem, chain, microbatch_size, known_s=known_s)]
        if chain.blocks:
            searches.append(in_a_row(problem, microbatch_size, found))
        for candidate in itertools.chain(*searches):
            found.append(candidate)
            yield candidate

    def _rows(
        self, problem: Problem, microbatch_size: int | None, first: StageGraph
    ) -> list[Candidate]:
        """What ``Sequential`` proposes, where its plans may be as good."""
        is_row = 1 < len(first) == first.depth
        if not (
            problem.cost.cluster.shared_cores or is_row or len(problem.order) <= MOST_OPERATORS
        ):
            return []
        rows = Sequential(self.max_replicas, self.candidates, self.tolerance, self.recompute)
        return rows.propose(replace(problem, chained=True), microbatch_size)

    def neighbourhood(
        self, cost: CostModel, batch_size: int, microbatch_size: int | None
    ) -> Callable[[StageGraph], list[StageGraph]]:
        """What lies near a stage graph; see ``planner.base`` and ``partitioner.polish``.

        Stages that wait for the one before them without reading from it go on doing so.
        """
        problem = self.problem(cost, batch_size)
        free = Polisher(problem, microbatch_size)
        chained = Polisher(replace(problem, chained=True), microbatch_size)

        def near(graph: StageGraph) -> list[StageGraph]:
            waits = len(graph.edges) > len(edge_values(graph, cost.graph))
            return (chained if waits else free)(graph)

        return near
