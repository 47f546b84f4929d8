"""PipeDream's planner: the best plan of its recurrence for every micro-batch size.

Where that plan does not fit, or the levels of the cluster allow none, it is the best that fits
with the devices as a single level on the slowest link.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import ClassVar

from anabranch.cluster import GIB
from anabranch.cost import CostModel
from anabranch.cost.nested_sets import NestedSets
from anabranch.errors import BudgetError
from anabranch.planner.base import require_options
from anabranch.planner.pipedream.recurrence import solve, solve_in_memory
from anabranch.planner.pipedream.terms import PlannedSpan, Terms, flat, stages, tiers
from anabranch.planner.toolkit.assemble import fits, stage_graph
from anabranch.planner.toolkit.budget import Budget
from anabranch.planner.toolkit.downsets import downsets
from anabranch.planner.toolkit.infeasible import explained
from anabranch.planner.toolkit.prices import Part
from anabranch.planner.toolkit.problem import Problem
from anabranch.plans.edges import mask_edges
from anabranch.plans.stages import StageGraph

MOST_BYTES = 4 * GIB
"""Most bytes of the tables of one level."""


@dataclass(frozen=True)
class PipeDream:
    """PipeDream's hierarchical dynamic programme (Narayanan et al., SOSP 2019, section 3.1).

    Optimal in its own objective, the time of the slowest stage, transfer or all-reduce, over
    pipelines that follow the levels of the cluster, with any number of replicas. One proposal per
    micro-batch size and objective.

    Attributes:
        max_replicas: replicas per stage at most; 1 gives the straight pipeline. None: no limit.
        antichains: stages are cut from the graph itself instead of from its operators in a row.
        accumulate: also plan for one all-reduce per step, as a synchronous pipeline has it; False:
            only the paper's objective, in which m replicas reduce once per m micro-batches.
        budget: most states where ``antichains`` is set.
        steps: most splits to compare; a thousand million take about 1.5 s. A search beyond them
            ends with its plans so far, those of larger micro-batches.
    """

    max_replicas: int | None = None
    antichains: bool = False
    accumulate: bool = True
    budget: int = 2000
    steps: int = 5_000_000_000

    schedules: ClassVar[tuple[str, ...]] = ("1f1b",)

    def __post_init__(self) -> None:
        require_options("pipedream", self, max_replicas=1, budget=1, steps=1)

    def __call__(
        self, cost: CostModel, *, batch_size: int, microbatch_size: int | None = None
    ) -> Iterator[StageGraph]:
        """Propose stage graphs, those of the largest micro-batches first; see ``planner.base``.

        Raises:
            InfeasiblePlanError: if nothing fits; the message says what would.
            BudgetError: if the model has more states than ``budget``, if its tables would take more
                than ``MOST_BYTES``, or if nothing was found in ``steps``.
        """
        problem = Problem(
            cost, batch_size, microbatch_size, self.max_replicas, chained=True
        ).checked()
        states = problem.row
        if self.antichains:
            states = NestedSets(cost, downsets(cost.graph, self.budget))
        _require_tables(cost, len(states))
        return explained(problem, self._proposals(problem, states))

    def _proposals(self, problem: Problem, states: NestedSets) -> Iterator[StageGraph]:
        budget = Budget(
            "pipedream",
            self.steps,
            "raise option steps, fix the micro-batch size, capture the model in coarser operators, "
            "or use planner sequential",
        )
        levels, seen = tiers(problem.cost.cluster), set[StageGraph]()
        for size, accumulate in product(
            reversed(problem.sizes), (False, True)[: 1 + self.accumulate]
        ):
            prices = problem.prices(size)
            terms = Terms(states, prices, levels, problem.most_replicas, accumulate)
            try:
                graph = self._best(terms, budget)
            except BudgetError:
                if seen:
                    return
                raise
            if graph is not None and graph not in seen:
                seen.add(graph)
                yield graph

    def _best(self, terms: Terms, budget: Budget) -> StageGraph | None:
        """Return the plan with the least period that fits."""
        spans = solve(terms, budget)
        graph = spans and self._stage_graph(terms, spans)
        if not graph:
            terms = replace(terms, tiers=flat(terms.prices.cost.cluster))
            within = solve_in_memory(terms, budget)
            graph = within and self._stage_graph(terms, within)
        return graph or None

    def _stage_graph(self, terms: Terms, pieces: Sequence[PlannedSpan]) -> StageGraph | None:
        """Place the stages of a plan on devices; None if they do not fit."""
        placed = list(stages(pieces, [tier.size for tier in terms.tiers]))
        parts = [Part(terms.states.mask(u, v), len(devices)) for u, v, devices in placed]
        pairs = mask_edges([part.mask for part in parts], terms.prices.cost.graph)
        if not self.antichains:
            # In a row every stage waits for the one before it.
            pairs |= {(s, s + 1) for s in range(len(parts) - 1)}
        if not fits(terms.prices, parts, pairs):
            return None
        return stage_graph(terms.prices, parts, [devices for _, _, devices in placed], pairs)


def _require_tables(cost: CostModel, states: int) -> None:
    cluster = cost.cluster
    # T and A take 8 bytes per span and component, headrooms 4 per device.
    components = max(tier.size for tier in tiers(cluster))
    nbytes = max(16 * components, 4 * cluster.num_devices) * states**2
    if nbytes > MOST_BYTES:
        raise BudgetError(
            f"planner pipedream would need {nbytes / GIB:.0f} GiB of tables for {states} states of "
            f"{cost.graph.name or 'the model'} on {cluster.name}, its budget is "
            f"{MOST_BYTES / GIB:.0f} GiB; capture the model in coarser operators, or use planner "
            "sequential or graphpipe"
        )
