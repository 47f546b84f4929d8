"""Baselines: what a plan is compared with, by planners that search for a moment."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from anabranch.cluster import Cluster
from anabranch.cost import CostModel
from anabranch.errors import AnabranchError
from anabranch.plans.plan import Plan
from anabranch.plans.stages import StageGraph
from anabranch.profile.profile import Profile
from anabranch.solve.planner_options import planner_with
from anabranch.solve.search import StepSearch, notes_on, plan
from anabranch.weights import OptimizerFacts

BASELINES: Mapping[str, Mapping[str, Any]] = {
    "data-parallel": {"planner": "data-parallel", "max_replicas": None},
    "sequential": {"planner": "sequential"},
    "straight sequential": {"planner": "sequential", "max_replicas": 1},
    "chain": {"planner": "chain", "planner_options": {"evaluations": 5_000}},
}
"""Name -> what its search has in place of the plan's options. Data parallelism is replicas. Planner
chain with all its evaluations and improved takes a second more for steps that are up to 7 %
shorter.
"""

_PRICED = ("optimizer_factor", "sparse_embeddings")
"""Options that change prices."""


@dataclass(frozen=True)
class Baseline:
    """A plan to compare with.

    Attributes:
        step_s: seconds of its step, or of a mini-batch without a flush.
        plan: all of it, with the figures that it takes longer to simulate.
    """

    step_s: float
    graph: StageGraph
    schedule: str
    plan: Callable[[], Plan]

    @classmethod
    def of(cls, plan: Plan) -> Baseline:
        """A plan that is known in full."""
        return cls(plan.figures.step_s, plan.stage_graph, plan.schedule, lambda: plan)


def baselines(
    found: Plan,
    profile: Profile,
    cluster: Cluster,
    *,
    optimizer: OptimizerFacts | None = None,
    **options: Any,
) -> Iterator[tuple[str, Baseline | AnabranchError]]:
    """Data parallelism, the best sequential plan and the straight one, as they are found: searched,
    but not improved by simulation. An interrupt (Ctrl-C) leaves out the rest, and reaches the
    caller.

    Args:
        found: what they are compared with.
        optimizer: see ``plan``, as for all other options.

    Yields:
        Name, and the baseline or why there is none.
    """
    graph = found.stage_graph
    priced = {name: options[name] for name in _PRICED if name in options}
    # They share what they make of it.
    cost = CostModel(profile, cluster, batch_size=graph.batch_size, **priced)

    def step(asked: Mapping[str, Any]) -> Baseline:
        planner, _ = planner_with(
            asked["planner"], asked.get("max_replicas"), asked.get("planner_options", {})
        )
        search = StepSearch(
            graph.batch_size,
            asked["planner"],
            planner,
            asked.get("microbatch_size"),
            asked.get("schedule", "auto"),
            improve=False,
            model=found.model,
        )
        best = search.find(cost, notes_on(profile), asked.get("shard_optimizer"))
        if best.interrupted:
            raise KeyboardInterrupt
        return Baseline(best.step_s, best.best.graph, best.best.schedule, best.plan)

    def period(asked: Mapping[str, Any]) -> Baseline:
        other = plan(
            profile,
            cluster,
            graph.batch_size,
            **asked,
            model=found.model,
            improve=False,
            mode=found.mode,
            policy=found.policy,
            optimizer=optimizer,
        )
        if other.interrupted:
            raise KeyboardInterrupt
        return Baseline.of(other)

    for name, changed in BASELINES.items():
        try:
            yield name, (period if found.mode == "async" else step)({**options, **changed})
        except AnabranchError as error:
            yield name, error
