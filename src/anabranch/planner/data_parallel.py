"""Data parallelism: the whole model on every device, gradients accumulated over micro-batches.

Recomputation saves nothing here: with one micro-batch in flight its insides are kept at once either
way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from anabranch.cost import CostModel
from anabranch.errors import InfeasiblePlanError
from anabranch.planner.toolkit.prices import Part
from anabranch.planner.toolkit.problem import Problem
from anabranch.plans.plan import memory_text
from anabranch.plans.stages import StageGraph


@dataclass(frozen=True)
class DataParallel:
    """One stage on all devices, for every micro-batch size; the quickest in outline first."""

    schedules: ClassVar[tuple[str, ...]] = ("1f1b",)

    def __call__(
        self, cost: CostModel, *, batch_size: int, microbatch_size: int | None = None
    ) -> list[StageGraph]:
        """Propose one stage graph per micro-batch size; see ``planner.base``.

        Raises:
            InfeasiblePlanError: if the model does not fit a device, or no micro-batch gives every
                device a sample count in the profile.
        """
        problem = Problem(cost, batch_size, microbatch_size).checked()
        every = [Part((1 << len(cost.graph)) - 1, problem.devices)]
        candidates = [
            problem.assembler(prices).assemble(every)
            for prices in map(problem.prices, problem.sizes)
            if prices.covers_replicas(problem.devices)
        ]
        fitting = sorted(filter(None, candidates), key=lambda candidate: candidate.outline_s)
        if not fitting:
            raise _explained(problem)
        return [candidate.graph for candidate in fitting]


def _explained(problem: Problem) -> InfeasiblePlanError:
    cost, total, cluster = problem.cost, problem.devices, problem.cost.cluster
    for size in problem.sizes:
        if problem.prices(size).covers_replicas(total):
            need = cost.device_bytes(
                range(len(cost.graph)), microbatch_size=size, replicas=total, in_flight=1
            )
            return InfeasiblePlanError(
                f"data parallelism needs {memory_text(need)} on each device at "
                f"{-(-size // total)} samples; {cluster.name} has "
                f"{memory_text(cluster.memory_bytes)}: more devices do not help below that, "
                "planner graphpipe may"
            )
    return InfeasiblePlanError(
        f"data parallelism on the {total} devices of {cluster.name} needs micro-batches of at "
        f"least {total} samples within the profile ({cost.profile.origin}); use a larger batch "
        f"than {problem.batch_size}, fewer devices, or planner graphpipe"
    )
