"""The sequential pipeline of today's systems, planned as well as possible.

The model is put in one order, branch after branch, and stages are contiguous runs of it::

    a1 a2 | a3 b1 | b2 b3 | join         stage 0 -> 1 -> 2 -> 3

Bisection, dynamic programme, prices and micro-batch sizes are those of ``graphpipe``, applied to
the operators in a row. There is a stage edge i -> i + 1 for every i: where no value flows its
messages have no bytes, so that warm-up counts and memory are those of a sequential pipeline. Values
go straight to the stages that read them (PipeDream and Piper relay them through the stages in
between, which would cost more).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from anabranch.cost import CostModel
from anabranch.planner.base import require_options
from anabranch.planner.graphpipe.planner import propose
from anabranch.planner.toolkit.problem import Problem
from anabranch.plans.stages import StageGraph


@dataclass(frozen=True)
class Sequential:
    """Dynamic programme over runs of the model in one order, branch after branch.

    The least period over such runs with power-of-two replicas, for every micro-batch size.

    Attributes:
        max_replicas: replicas per stage at most; 1 gives the straight pipeline. None: no limit.
        tolerance: relative distance to the least period at which its search ends.
        recompute: where nothing fits otherwise, stages may run their forward again in the backward.
    """

    max_replicas: int | None = None
    tolerance: float = 5e-3
    recompute: bool = True

    schedules: ClassVar[tuple[str, ...]] = ("1f1b",)

    def __post_init__(self) -> None:
        require_options("sequential", self, max_replicas=1, tolerance=1e-6)

    def __call__(
        self, cost: CostModel, *, batch_size: int, microbatch_size: int | None = None
    ) -> Iterator[StageGraph]:
        """Yield the plan of every micro-batch size as soon as it is known; see ``planner.base``.

        Raises:
            InfeasiblePlanError: if nothing fits; the message says what would.
        """
        problem = Problem(cost, batch_size, microbatch_size, self.max_replicas, chained=True)
        problem = replace(problem, recompute=self.recompute).checked()
        # Planned more than once: as a start of ``auto`` and as a baseline.
        known = cost.memo.setdefault(Sequential, {})
        asked = self, batch_size, microbatch_size
        plans: list[StageGraph] = []
        for graph in known.get(asked) or propose(problem, self.tolerance):
            plans.append(graph)
            yield graph
        known[asked] = plans
