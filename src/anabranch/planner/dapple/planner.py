"""DAPPLE's planner: a search per micro-batch size, and stage graphs of what they find."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import ClassVar

from anabranch.cost import CostModel
from anabranch.errors import InfeasiblePlanError
from anabranch.graph.series_parallel import decompose, operators
from anabranch.planner.base import require_options
from anabranch.planner.dapple.placement import Machines, append_first
from anabranch.planner.dapple.search import ChainPlan, PlacementSearch
from anabranch.planner.dapple.tables import ChainProblem, Tables
from anabranch.planner.toolkit.budget import Budget
from anabranch.planner.toolkit.infeasible import explain, require_sizes
from anabranch.planner.toolkit.prices import microbatch_sizes
from anabranch.planner.toolkit.problem import Problem
from anabranch.plans.stages import Stage, StageGraph

NEAR = 1.2
"""A micro-batch size gets no proposal if its least L is not within this factor of the best."""

PLACED = 1.1
"""Placements are searched for a micro-batch size if what is known of it is within this factor."""

RUNNER_UP = 1.1
"""Nor does a plan that is not within this factor of the best of its micro-batch size."""


@dataclass(frozen=True)
class Dapple:
    """DAPPLE's planner: the least latency L of one synchronous step over hybrids of data and
    pipeline parallelism.

    Attributes:
        overlap_allreduce: count of the all-reduce of a stage only what sticks out of the backward.
        max_replicas: replicas per stage at most; 1 gives the straight pipeline. None: no limit.
        max_stages: stages at most. None: no limit.
        candidates: stage graphs to propose at most.
        width: plans to keep per state and ranking; the paper keeps one. None: all, which finds the
            least L for certain and takes exponential time.
        budget: plans that may be priced. A million take about a second.
    """

    overlap_allreduce: bool = False
    max_replicas: int | None = None
    max_stages: int | None = None
    candidates: int = 24
    width: int | None = 4
    budget: int = 50_000_000

    schedules: ClassVar[tuple[str, ...]] = ("1f1b", "1f1b-deep")

    def __post_init__(self) -> None:
        least = dict.fromkeys(("max_replicas", "max_stages", "candidates", "width", "budget"), 1)
        require_options("dapple", self, **least)

    def __call__(
        self, cost: CostModel, *, batch_size: int, microbatch_size: int | None = None
    ) -> Iterator[StageGraph]:
        """Propose stage graphs, the least L first; see ``planner.base``.

        Where several machines have several devices each, what is known before placements are
        searched comes even before that.

        Raises:
            InfeasiblePlanError: if nothing fits; the message says what would.
            BudgetError: if more plans than ``budget`` would be priced.
        """
        limit = self.max_replicas or cost.cluster.num_devices
        require_sizes(cost, batch_size, microbatch_size, limit)
        order = tuple(operators(decompose(cost.graph)))
        problem = ChainProblem(cost, batch_size, order, limit, self.overlap_allreduce)
        proposals = self._proposals(problem, microbatch_size)
        first = next(proposals, None)
        if first is None:
            raise self._explain(cost, batch_size, microbatch_size)
        return chain([first], proposals)

    def _proposals(
        self, problem: ChainProblem, microbatch_size: int | None
    ) -> Iterator[StageGraph]:
        cluster = problem.cost.cluster
        machines, in_rows = Machines(cluster), Machines(cluster, (append_first,))
        budget = Budget(
            "dapple",
            self.budget,
            "raise its option budget, lower width, set max_stages, give one micro-batch size, or "
            "capture the model in coarser operators",
        )
        found = self._in_rows(problem, microbatch_size, in_rows, budget)
        seen: set[StageGraph] = set()
        if found and 1 < machines.size < cluster.num_devices:
            early = found[0].graph(problem)
            seen.add(early)
            yield early
            best_s = found[0].chain.latency_s
            for table, known in _by_size(found):
                if known.latency_s > PLACED * best_s:
                    continue
                limit_s = min(known.latency_s, NEAR * best_s)
                chains = self._search(table, machines, budget, limit_s)
                found += [Planned(chain, table) for chain in chains]
                best_s = min(planned.chain.latency_s for planned in found)
        for planned in _worthwhile(found)[: self.candidates]:
            graph = planned.graph(problem)
            if graph not in seen:
                seen.add(graph)
                yield graph

    def _in_rows(
        self, problem: ChainProblem, microbatch_size: int | None, machines: Machines, budget: Budget
    ) -> list[Planned]:
        """Plans of every micro-batch size that is not hopeless, machines filled up in turn.

        That is as good as composing the policies with one machine or one device each; else quicker.
        """
        sizes = microbatch_sizes(problem.batch_size, microbatch_size)
        tables = [Tables(problem, size) for size in sizes if problem.degrees(size)]
        found: list[Planned] = []
        best_s = float("inf")
        for table in sorted(tables, key=lambda table: table.least_s):
            chains = self._search(table, machines, budget, NEAR * best_s)
            found += [Planned(chain, table) for chain in chains]
            best_s = min([best_s, *(chain.latency_s for chain in chains)])
        return _worthwhile(found)

    def _search(
        self, tables: Tables, machines: Machines, budget: Budget, limit_s: float
    ) -> list[ChainPlan]:
        search = PlacementSearch(
            tables,
            machines,
            width=self.width,
            max_stages=self.max_stages,
            budget=budget,
            limit_s=limit_s,
        )
        return search.run()

    def _explain(
        self, cost: CostModel, batch_size: int, microbatch_size: int | None
    ) -> InfeasiblePlanError:
        if self.max_stages is not None:
            return InfeasiblePlanError(
                f"no plan of at most {self.max_stages} stages uses all "
                f"{cost.cluster.num_devices} devices of {cost.cluster.name} and fits their "
                "memory; raise option max_stages"
            )
        return explain(Problem(cost, batch_size, self.max_replicas, chained=True), microbatch_size)


@dataclass(frozen=True)
class Planned:
    """A plan and the tables of its micro-batch size."""

    chain: ChainPlan
    tables: Tables

    def graph(self, problem: ChainProblem) -> StageGraph:
        """The plan as a stage graph."""
        return stage_graph(problem, self.chain, self.tables.microbatch_size)


def _worthwhile(found: list[Planned]) -> list[Planned]:
    """Those that are near the best and the best of their size, the least L first."""
    ranked = sorted(found, key=lambda planned: planned.chain.latency_s)
    best = {table: chain.latency_s for table, chain in _by_size(ranked)}
    return [
        planned
        for planned in ranked
        if planned.chain.latency_s
        <= min(RUNNER_UP * best[planned.tables], NEAR * ranked[0].chain.latency_s)
    ]


def _by_size(found: list[Planned]) -> list[tuple[Tables, ChainPlan]]:
    """The best plan of every micro-batch size, the least L first."""
    best: dict[Tables, ChainPlan] = {}
    for planned in sorted(found, key=lambda planned: planned.chain.latency_s):
        best.setdefault(planned.tables, planned.chain)
    return list(best.items())


def stage_graph(problem: ChainProblem, chain: ChainPlan, microbatch_size: int) -> StageGraph:
    """The stage graph of a plan: a chain, with the edges along which values skip stages."""
    graph = problem.cost.graph
    runs = [problem.order[i:j] for i, j in pairwise(chain.cuts)]
    home = {op: s for s, run in enumerate(runs) for op in run}
    flows = {(home[a], home[b]) for a, b in graph.edges if home[a] != home[b]}
    stages = tuple(
        Stage(graph.names(sum(1 << op for op in run)), devices, microbatch_size)
        for run, devices in zip(runs, chain.devices, strict=True)
    )
    return StageGraph(
        stages, tuple(sorted(flows | set(pairwise(range(len(runs)))))), problem.batch_size
    )
