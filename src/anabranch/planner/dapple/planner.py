"""DAPPLE's planner: a search per micro-batch size, and stage graphs of its plans."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

from anabranch.cost import CostModel
from anabranch.planner.base import require_options
from anabranch.planner.dapple.placement import Machines, append_first
from anabranch.planner.dapple.search import ChainPlan, PlacementSearch
from anabranch.planner.dapple.tables import RunTables
from anabranch.planner.toolkit.assemble import stage_graph
from anabranch.planner.toolkit.budget import Budget
from anabranch.planner.toolkit.infeasible import explained
from anabranch.planner.toolkit.prices import Part
from anabranch.planner.toolkit.problem import Problem
from anabranch.plans.edges import mask_edges
from anabranch.plans.stages import StageGraph


@dataclass(frozen=True)
class Thresholds:
    """Factors of the least known L beyond which parts of the search are skipped.

    Attributes:
        proposed: micro-batch sizes with proposals.
        placed: micro-batch sizes whose placements are searched.
        runner_up: plans of a micro-batch size, over its plan that fills one machine after another.
    """

    proposed: float = 1.2
    placed: float = 1.1
    runner_up: float = 1.1


THRESHOLDS = Thresholds()


@dataclass(frozen=True)
class Dapple:
    """DAPPLE's planner: the least latency L of one synchronous step over hybrids of data and
    pipeline parallelism.

    Attributes:
        overlap_allreduce: price only the part of a stage's all-reduce after its backward.
        max_replicas: replicas per stage at most; 1 gives the straight pipeline. None: no limit.
        width: plans to keep per state and ranking; the paper keeps one. None: all, which finds the
            least L for certain and takes exponential time.
        budget: plans that may be priced. A million take about a quarter of a second.
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
            BudgetError: if more plans than ``budget`` would be priced.
        """
        problem = Problem(
            cost, batch_size, microbatch_size, self.max_replicas, chained=True, any_degree=True
        ).checked()
        return explained(problem, self._proposals(problem))

    def _proposals(self, problem: Problem) -> Iterator[StageGraph]:
        cluster = problem.cost.cluster
        machines, in_rows = Machines(cluster), Machines(cluster, (append_first,))
        budget = Budget(
            "dapple",
            self.budget,
            "raise its option budget, lower width, give one micro-batch size, or capture the model "
            "in coarser operators",
        )

        def search(tables: RunTables, machines: Machines, limit_s: float) -> list[ChainPlan]:
            recursion = PlacementSearch(tables, machines, budget, width=self.width, limit_s=limit_s)
            return recursion.run()

        prices = [problem.prices(size) for size in problem.sizes]
        tables = [
            RunTables(problem.row, size_prices, self.overlap_allreduce)
            for size_prices in prices
            if size_prices.degrees
        ]
        best_s, known = float("inf"), []
        # Machines filled up in turn are quickly searched, and all there is if there is one machine,
        # or one device in each.
        for table in sorted(tables, key=lambda table: table.least_s):
            chains = search(table, in_rows, THRESHOLDS.proposed * best_s)
            if chains:
                known.append((chains, table))
                best_s = min(best_s, chains[0].latency_s)
        for chains, table in sorted(known, key=lambda entry: entry[0][0].latency_s):
            least_s = chains[0].latency_s
            near = least_s <= THRESHOLDS.placed * best_s
            if 1 < machines.size < cluster.num_devices and near:
                yield placed(table, chains[0])
                chains += search(table, machines, least_s)
                best_s = min(best_s, *(chain.latency_s for chain in chains))
            limit_s = min(THRESHOLDS.runner_up * least_s, THRESHOLDS.proposed * best_s)
            for chain in sorted(chains, key=lambda chain: chain.latency_s):
                if chain.latency_s <= limit_s:
                    yield placed(table, chain)


def placed(tables: RunTables, chain: ChainPlan) -> StageGraph:
    """Return the stage graph of a chain, with edges for values that skip stages."""
    masks = [tables.row.mask(i, j) for i, j in pairwise(chain.cuts)]
    edges = mask_edges(masks, tables.row.cost.graph) | set(pairwise(range(len(masks))))
    parts = [Part(mask, len(where)) for mask, where in zip(masks, chain.devices, strict=True)]
    return stage_graph(tables.prices, parts, chain.devices, edges)
