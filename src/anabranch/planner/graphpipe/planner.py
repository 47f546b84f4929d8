"""GraphPipe's sweep over micro-batch sizes, and the stage graphs of its stages.

Planner ``sequential``, the pipeline of systems without stage graphs, is the same search with the
model in one order, branch after branch, and stages that are contiguous runs of it::

    a1 a2 | a3 b1 | b2 b3 | join         stage 0 -> 1 -> 2 -> 3

There is a stage edge i -> i + 1 for every i: where no value flows its messages have no bytes, so
that warm-up counts and memory are those of a sequential pipeline. Values go straight to the stages
that read them; PipeDream and Piper relay them through the stages in between, which costs more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from typing import ClassVar

from anabranch.cost import CostModel
from anabranch.planner.base import require_options
from anabranch.planner.graphpipe.chains import line, tree
from anabranch.planner.graphpipe.partitioner import PlannedStage, partition
from anabranch.planner.graphpipe.schedules import Configuration, Schedules, configurations
from anabranch.planner.toolkit.budget import Budget
from anabranch.planner.toolkit.infeasible import explain
from anabranch.planner.toolkit.prices import MicrobatchPrices, Part
from anabranch.planner.toolkit.problem import Problem
from anabranch.plans.check import suits
from anabranch.plans.stages import StageGraph

ITEMS, ITEMS_OF_GROUPS = 128, 64
"""Most items of a chain, about, with single devices and with devices in groups; larger models are
made coarser.
"""

GROUPS = 64
"""Most groups of devices; the devices of a larger cluster are given out in groups."""

STEPS = 1e10
"""Most steps of the innermost loops, which take 10 to 20 seconds."""


@dataclass(frozen=True)
class GraphPipe:
    """Bisection over the slowest stage, a dynamic programme over the series-parallel structure.

    By default, as in the paper, 1F1B with one micro-batch size for all stages, every size in turn.

    Attributes:
        max_replicas: replicas per stage at most. None: no limit.
        tolerance: relative distance to the least time per sample at which the bisection ends.
        recompute: where nothing fits otherwise, stages may run their forward again in the backward.
        per_stage: search a micro-batch size and kFkB for every stage instead; for few operators
            and devices.
        chained: stages in one row: planner ``sequential``.
    """

    max_replicas: int | None = None
    tolerance: float = 5e-3
    recompute: bool = True
    per_stage: bool = False
    chained: bool = False

    schedules: ClassVar[tuple[str, ...]] = ("1f1b",)

    def __post_init__(self) -> None:
        name = "sequential" if self.chained else "graphpipe"
        require_options(name, self, max_replicas=1, tolerance=1e-6)

    def __call__(
        self, cost: CostModel, *, batch_size: int, microbatch_size: int | None = None
    ) -> Iterator[StageGraph]:
        """Yield the plan of every micro-batch size as soon as it is known; see ``planner.base``.

        Raises:
            BudgetError: if ``per_stage`` would take too many steps.
            InfeasiblePlanError: if nothing fits; the message says what would.
        """
        problem = Problem(
            *(cost, batch_size, microbatch_size, self.max_replicas),
            chained=self.chained,
            recompute=self.recompute,
        ).checked()
        # Planned more than once: as a start of ``auto`` and as a baseline.
        known = cost.memo.setdefault(GraphPipe, {})
        asked = self, batch_size, microbatch_size
        plans: list[StageGraph] = []
        for graph in known.get(asked) or _propose(problem, self.tolerance, self.per_stage):
            plans.append(graph)
            yield graph
        known[asked] = plans


def _propose(problem: Problem, tolerance: float, per_stage: bool) -> Iterator[StageGraph]:
    """Generate stage graphs of the partitioner's stages; arguments as for the planner."""
    together = configurations(problem.sizes, problem.batch_size)
    sets = [together] if per_stage else [(Configuration(size),) for size in problem.sizes]
    budget = Budget(
        "graphpipe",
        STEPS,
        "leave out the option per_stage, give a micro-batch size, capture the model in coarser "
        "operators, take fewer devices, or use planner auto",
    )
    unit, has_plan = _unit(problem), False
    # Enough items for stages on all devices.
    items = max(
        ITEMS if unit == 1 else ITEMS_OF_GROUPS, 2 * problem.devices // problem.most_replicas
    )
    row = line(problem.cost, problem.order, items)
    chain = row if problem.chained else tree(problem.cost, problem.tree, items)
    # The last resort is a row, which ``explain`` counts on.
    for within, published in ((chain, True), (chain, False), (row, False)):
        for chosen in sets:
            prices = tuple(_prices(problem, c.microbatch_size, published) for c in chosen)
            schedules = Schedules(chosen, prices, unit)
            if not schedules.modes:
                continue
            stages = partition(within, schedules, problem.devices // unit, tolerance, budget)
            for graph in _placed(problem, schedules, stages) if stages else ():
                has_plan = True
                yield graph
        if has_plan:
            return
    raise explain(problem)


def _unit(problem: Problem) -> int:
    """Return the size of device groups: a power of two if one divides all devices."""
    total = problem.devices
    few = [unit for unit in range(1, total + 1) if total % unit == 0 and total // unit <= GROUPS]
    unit = min(few, key=lambda unit: (unit.bit_count() > 1, unit))
    return unit if unit <= problem.most_replicas else 1


def _prices(problem: Problem, microbatch_size: int, published: bool) -> MicrobatchPrices:
    """Return prices with replicas in powers of two only, or with all that may make a plan fit."""
    if published:
        return replace(problem.prices(microbatch_size), recompute=False)
    return replace(problem, any_degree=True).prices(microbatch_size)


def _placed(
    problem: Problem, schedules: Schedules, stages: Sequence[PlannedStage]
) -> Iterator[StageGraph]:
    """Place the stages on devices in every way of ``toolkit.place``."""
    runs = {stage.mask: schedules.configurations[stage.configuration] for stage in stages}
    assembler = problem.assembler(schedules.prices[0])
    modes = (schedules.modes[stage.mode] for stage in stages)
    parts, pairs = assembler.arrange(
        [Part(stage.mask, *astuple(mode)) for stage, mode in zip(stages, modes, strict=True)]
    )
    for graph in assembler.placed(parts, pairs):
        own = tuple(
            replace(stage, microbatch_size=runs[part.mask].microbatch_size, k=runs[part.mask].k)
            for part, stage in zip(parts, graph.stages, strict=True)
        )
        proposal = replace(graph, stages=own)
        if suits(proposal, problem.cost):
            yield proposal
