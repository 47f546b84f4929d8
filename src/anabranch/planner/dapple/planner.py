"""DAPPLE's planner: a search per micro-batch size, and stage graphs of its plans."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

from anabranch.cost import CostModel
from anabranch.errors import BudgetError
from anabranch.planner.base import require_options
from anabranch.planner.dapple.placement import Machines
from anabranch.planner.dapple.search import ChainPlan, PlacementSearch
from anabranch.planner.dapple.tables import RunTables
from anabranch.planner.toolkit.assemble import stage_graph
from anabranch.planner.toolkit.budget import Budget
from anabranch.planner.toolkit.infeasible import explained
from anabranch.planner.toolkit.prices import Part
from anabranch.planner.toolkit.problem import Problem
from anabranch.plans.edges import mask_edges
from anabranch.plans.stages import StageGraph

NEAR = 1.5
"""Factor of the least known L up to which plans are proposed and other sizes searched. With 1.2 a
plan for candle-uno on 32 devices takes a fourth longer."""


@dataclass(frozen=True)
class Dapple:
    """DAPPLE's planner: the least latency L of one synchronous step over hybrids of data and
    pipeline parallelism.

    Attributes:
        overlap_allreduce: price only the part of a stage's all-reduce after its backward.
        max_replicas: replicas per stage at most; 1 gives the straight pipeline. None: no limit.
        width: plans to keep per cut, devices in use and ranking; the paper keeps one per state.
            None: all, which finds the least L for certain and takes exponential time.
        budget: plans that may be priced. A million take about a second. A search that has plans by
            then, those of other micro-batch sizes, ends with those.
    """

    overlap_allreduce: bool = False
    max_replicas: int | None = None
    width: int | None = 4
    budget: int = 50_000_000

    schedules: ClassVar[tuple[str, ...]] = ("1f1b", "1f1b-deep")

    def __post_init__(self) -> None:
        require_options("dapple", self, max_replicas=1, width=1, budget=1)

    def __call__(
        self, cost: CostModel, *, batch_size: int, microbatch_size: int | None = None
    ) -> Iterator[StageGraph]:
        """Propose plans of the least L for every micro-batch size and number of stages, promising
        sizes first; see ``planner.base``.

        Raises:
            InfeasiblePlanError: if nothing fits; the message says what would.
            BudgetError: if nothing was found in ``budget``.
        """
        problem = Problem(
            cost, batch_size, microbatch_size, self.max_replicas, chained=True, any_degree=True
        ).checked()
        return explained(problem, self._proposals(problem))

    def _proposals(self, problem: Problem) -> Iterator[StageGraph]:
        machines = Machines(problem.cost.cluster)
        budget = Budget(
            "dapple",
            self.budget,
            "raise its option budget, lower width, give one micro-batch size, or capture the model "
            "in coarser operators",
        )
        tables = [
            RunTables(problem.row, prices, self.overlap_allreduce)
            for prices in map(problem.prices, problem.sizes)
            if prices.degrees
        ]
        limit_s, known = float("inf"), list[tuple[list[ChainPlan], RunTables]]()
        for table in sorted(tables, key=lambda table: table.least_s):
            search = PlacementSearch(table, machines, budget, width=self.width, limit_s=limit_s)
            try:
                chains = search.run()
            except BudgetError:
                if known:
                    break
                raise
            if chains:
                known.append((chains, table))
                limit_s = min(limit_s, NEAR * chains[0].latency_s)
        for chains, table in sorted(known, key=lambda entry: entry[0][0].latency_s):
            for chain in chains:
                if chain.latency_s <= limit_s:
                    yield placed(table, chain)


def placed(tables: RunTables, chain: ChainPlan) -> StageGraph:
    """Return the stage graph of a chain, with edges for values that skip stages."""
    masks = [tables.row.mask(i, j) for i, j in pairwise(chain.cuts)]
    edges = mask_edges(masks, tables.row.cost.graph) | set(pairwise(range(len(masks))))
    parts = [Part(mask, len(where)) for mask, where in zip(masks, chain.devices, strict=True)]
    return stage_graph(tables.prices, parts, chain.devices, edges)
