"""The planner itself: micro-batch sizes, one search each, and stage graphs from what they find."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

from anabranch.cost import CostModel
from anabranch.errors import InfeasiblePlanError
from anabranch.graph.cuts import decompose, operators
from anabranch.planner.dapple.placement import Machines, append_first
from anabranch.planner.dapple.search import Budget, Chain, Search
from anabranch.planner.dapple.tables import Tables, Terms
from anabranch.planner.infeasible import explain, require_sizes
from anabranch.planner.partitioner.prices import microbatch_sizes
from anabranch.planner.sequential import Sequential
from anabranch.planner.stages import Stage, StageGraph

HOPELESS = 1.2
"""A micro-batch size gets no proposal if its least L is not within this factor of the best."""

RUNNER_UP = 1.1
"""Nor does a plan that is not within this factor of the best of its micro-batch size."""


@dataclass(frozen=True)
class Dapple:
    """DAPPLE's planner: the least latency L of one synchronous step over hybrids of data and
    pipeline parallelism.

    Attributes:
        overlap_allreduce: count of the all-reduce of a stage only what sticks out of the backward.
        max_replicas: devices per stage at most; 1 gives the straight pipeline. None: no limit.
        max_stages: stages at most. None: no limit.
        candidates: stage graphs to propose at most.
        width: plans to keep per state and ranking; the paper keeps one. None: all, which is exact
            and takes exponential time.
        budget: plans that may be priced. A million take about a second.
    """

    overlap_allreduce: bool = False
    max_replicas: int | None = None
    max_stages: int | None = None
    candidates: int = 24
    width: int | None = 4
    budget: int = 30_000_000

    schedules: ClassVar[tuple[str, ...]] = ("1f1b", "1f1b-deep")

    def __call__(
        self, cost: CostModel, *, batch_size: int, microbatch_size: int | None = None
    ) -> list[StageGraph]:
        """Propose stage graphs, the least L first; see ``planner.base``.

        Raises:
            InfeasiblePlanError: if nothing fits; the message says what would.
            BudgetError: if more plans than ``budget`` would be priced.
        """
        limit = self.max_replicas or cost.cluster.num_devices
        require_sizes(cost, batch_size, microbatch_size, limit)
        order = tuple(operators(decompose(cost.graph)))
        terms = Terms(cost, batch_size, order, limit, self.overlap_allreduce)
        found = sorted(self._chains(terms, microbatch_size), key=lambda each: each[0].latency_s)
        if not found:
            raise self._explain(cost, batch_size, microbatch_size)
        graphs = [stage_graph(terms, chain, size) for chain, size in found[: self.candidates]]
        return list(dict.fromkeys(graphs))

    def _chains(self, terms: Terms, microbatch_size: int | None) -> Iterator[tuple[Chain, int]]:
        """Plans of every micro-batch size that is not hopeless, with the size."""
        machines = Machines(terms.cost.cluster)
        in_rows = Machines(terms.cost.cluster, (append_first,))
        sizes = [microbatch_size] if microbatch_size else microbatch_sizes(terms.batch_size)
        tables = [Tables(terms, size) for size in sizes if terms.degrees(size)]
        budget = Budget(self.budget)
        best_s = float("inf")
        for each in sorted(tables, key=lambda table: table.least_s):
            known = self._search(each, in_rows, budget, HOPELESS * best_s)
            limit_s = min([HOPELESS * best_s, *(chain.latency_s for chain in known[:1])])
            chains = self._search(each, machines, budget, limit_s)
            chains = sorted([*known, *chains], key=lambda chain: chain.latency_s)
            best_s = min([best_s, *(chain.latency_s for chain in chains[:1])])
            for chain in chains:
                if chain.latency_s <= min(RUNNER_UP * chains[0].latency_s, HOPELESS * best_s):
                    yield chain, each.microbatch_size

    def _search(
        self, tables: Tables, machines: Machines, budget: Budget, limit_s: float
    ) -> list[Chain]:
        search = Search(
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
        problem = Sequential(max_replicas=self.max_replicas).problem(cost, batch_size)
        return explain(problem, microbatch_size)


def stage_graph(terms: Terms, chain: Chain, microbatch_size: int) -> StageGraph:
    """The stage graph of a plan: a chain, with the edges along which values skip stages."""
    graph = terms.cost.graph
    runs = [terms.order[i:j] for i, j in pairwise(chain.cuts)]
    home = {op: s for s, run in enumerate(runs) for op in run}
    flows = {(home[a], home[b]) for a, b in graph.edges if home[a] != home[b]}
    stages = tuple(
        Stage(graph.names(sum(1 << op for op in run)), devices, microbatch_size)
        for run, devices in zip(runs, chain.devices, strict=True)
    )
    return StageGraph(
        stages, tuple(sorted(flows | set(pairwise(range(len(runs)))))), terms.batch_size
    )
