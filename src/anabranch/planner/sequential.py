"""The sequential pipeline: what every pipeline system offers today, planned as well as possible.

The model is put in one order, branch after branch, and stages are contiguous runs of it::

    a1 a2 | a3 b1 | b2 b3 | join         stage 0 -> 1 -> 2 -> 3

Dynamic programme, prices, replicas and micro-batch sizes are those of ``graphpipe``. There is a
stage edge i -> i + 1 for every i: where no value flows its messages have no bytes, so that warm-up
counts and memory are those of a sequential pipeline. Values go straight to the stages that read
them (PipeDream and Piper relay them through the stages in between, which would cost more).

``partitioner.polish`` changes the best proposals; the stages stay a row, each convex, but need not
be runs of the one order any more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from anabranch.cost import CostModel
from anabranch.planner.base import require_options
from anabranch.planner.data_parallel import data_parallel
from anabranch.planner.partitioner.chains import line
from anabranch.planner.partitioner.period_search import best, thoroughly
from anabranch.planner.partitioner.polish.polisher import Polisher
from anabranch.planner.toolkit.assemble import Candidate
from anabranch.planner.toolkit.infeasible import explain, require_sizes
from anabranch.planner.toolkit.problem import Problem
from anabranch.plans.stages import StageGraph


@dataclass(frozen=True)
class Sequential:
    """Dynamic programme over runs of the model in one order, branch after branch.

    Optimal over such runs with power-of-two replicas in the period of ``toolkit.prices``, for
    every micro-batch size that is not hopeless. Data parallelism is among the candidates where it
    fits.

    Attributes:
        max_replicas: replicas per stage at most; 1 gives the straight pipeline. None: no limit.
        candidates: stage graphs to propose at most.
        tolerance: relative distance to the least period at which its search ends.
        recompute: stages may run their forward again in the backward where memory is short.
    """

    max_replicas: int | None = None
    candidates: int = 24
    tolerance: float = 2e-3
    recompute: bool = True

    schedules: ClassVar[tuple[str, ...]] = ("1f1b",)

    def __post_init__(self) -> None:
        require_options("sequential", self, max_replicas=1, candidates=1, tolerance=0)

    def __call__(
        self, cost: CostModel, *, batch_size: int, microbatch_size: int | None = None
    ) -> list[StageGraph]:
        """Propose stage graphs, the least estimated step first; see ``planner.base``.

        Raises:
            InfeasiblePlanError: if nothing fits; the message says what would.
        """
        problem = self.problem(cost, batch_size)
        require_sizes(cost, batch_size, microbatch_size, problem.most_replicas)
        found = self.propose(problem, microbatch_size)
        if not found:
            raise explain(problem, microbatch_size)
        return [candidate.graph for candidate in found]

    def problem(self, cost: CostModel, batch_size: int) -> Problem:
        """What is searched."""
        return Problem(
            cost,
            batch_size,
            self.max_replicas,
            chained=True,
            recompute=self.recompute,
            tolerance=max(self.tolerance, 1e-9),
        )

    def propose(self, problem: Problem, microbatch_size: int | None) -> list[Candidate]:
        """The best candidates with their estimates; empty if nothing fits."""
        chain = line(problem.cost, problem.order, coarse=True)
        # A yardstick is worth some time: no size is left out early, all are looked at closely.
        found = list(thoroughly(problem, chain, problem.sizes(microbatch_size)))
        return best(found, self.candidates, always=list(data_parallel(problem, microbatch_size)))

    def neighbourhood(
        self, cost: CostModel, batch_size: int, microbatch_size: int | None
    ) -> Polisher:
        """What lies near a stage graph, chains alone; see ``planner.base``."""
        return Polisher(self.problem(cost, batch_size), microbatch_size)
