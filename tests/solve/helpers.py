"""Small models, planners and plans."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from anabranch import solve
from anabranch.cost import CostModel
from anabranch.planner.auto.search import Search
from anabranch.planner.base import PLAIN_RUN, RunOptions
from anabranch.plans.plan import Plan, Prediction
from anabranch.plans.stages import Stage, StageGraph
from anabranch.schedule import SCHEDULES
from anabranch.solve import plan
from tests.simulator.helpers import chain, cluster, cost_model, stage_graph


def on_chain(count: int = 4, **options) -> CostModel:
    """Equal operators in a row, 1 s forward and 2 s backward per sample, 100 bytes of weights."""
    return cost_model(
        chain(count), [1.0] * count, [2.0] * count, cluster(count, **options), parameter_bytes=100
    )


def asynchronous(cost: CostModel, batch_size: int, **options) -> Plan:
    """A plan without a flush."""
    return solve.plan(cost.profile, cost.cluster, batch_size, mode="async", **options)


def two_stages(num_microbatches: int, **options) -> tuple[CostModel, StageGraph]:
    """Two equal stages, 1 s forward and 1 s backward per sample, and the plan without replicas."""
    cost = cost_model(chain(2), [1, 1], [1, 1], cluster(2, **options), value_bytes=8)
    return cost, stage_graph(chain(2), [(0,), (1,)], num_microbatches)


def with_size(graph: StageGraph, size: int) -> StageGraph:
    """Another micro-batch size for all stages."""
    stages = tuple(replace(stage, microbatch_size=size) for stage in graph.stages)
    return replace(graph, stages=stages)


def found(cost: CostModel, batch_size: int, **options) -> Plan:
    """The plan of the registered planner."""
    return plan(cost.profile, cost.cluster, batch_size, planner="test", **options)


def a_plan(graph: StageGraph, schedule: str = "1f1b") -> Plan:
    """A plan as a file would hold it."""
    predicted = Prediction(1.0, 1.0, 0.0, (0,) * len(graph.devices))
    warm = SCHEDULES[schedule]().warm_up(graph)
    return Plan(warm, schedule, "test", "m", "test", "p", 0.0, 0.0, predicted)


class Scripted(Search):
    """A planner and its search in one, which knows nothing near its proposals."""

    def __call__(self, cost: CostModel, *, batch_size: int, microbatch_size: int | None = None):
        return self

    def likely(self) -> list[StageGraph]:
        return []

    def near(self, graph: StageGraph, runs: RunOptions = PLAIN_RUN) -> list[StageGraph]:
        return []

    def promising(
        self, graphs: Iterable[StageGraph], runs: RunOptions, limit: float = math.inf
    ) -> list[StageGraph]:
        return []

    def again(
        self, best: StageGraph, runs: RunOptions, choice: RunOptions
    ) -> list[tuple[StageGraph, RunOptions]]:
        return []

    def is_misled(self, graph: StageGraph, runs: RunOptions, seconds: float) -> bool:
        return False

    def loops(self, limit: float, *, recompute: bool) -> list[StageGraph]:
        return []

    def branches(self, limit: float) -> list[StageGraph]:
        return []


@dataclass(frozen=True)
class Limited:
    """A planner with a limit on replicas: two independent operators in one stage or in two."""

    max_replicas: int | None = None

    def __call__(
        self, cost: CostModel, *, batch_size: int, microbatch_size: int | None = None
    ) -> Iterator[StageGraph]:
        size = microbatch_size or batch_size
        if self.max_replicas is None:
            yield StageGraph((Stage(("op0", "op1"), (0, 1, 2, 3), size),), (), batch_size)
        else:
            yield stage_graph((), [(0, 1), (2, 3)], batch_size, [size, size])


@dataclass(frozen=True)
class Published:
    """A planner whose paper fills the pipeline first."""

    graph: StageGraph
    times: int = 1
    schedules: ClassVar[tuple[str, ...]] = ("gpipe",)

    def __call__(self, cost: CostModel, *, batch_size: int, microbatch_size: int | None = None):
        return [self.graph] * self.times


@dataclass(frozen=True)
class Proposals:
    """A planner that proposes what it was given."""

    graphs: tuple[StageGraph, ...]

    def __call__(self, cost: CostModel, *, batch_size: int, microbatch_size: int | None = None):
        return self.graphs
