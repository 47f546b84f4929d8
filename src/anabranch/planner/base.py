"""The contract of every planner."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from anabranch.cost import CostModel
from anabranch.planner.stages import StageGraph


class Planner(Protocol):
    """Proposes stage graphs for a model on a cluster, best first by its own objective.

    A proposal uses every device of ``cost.cluster``, passes ``planner.check`` and leaves
    ``in_flight`` to the schedule. ``anabranch.solve.plan`` schedules and simulates the proposals
    and keeps the best. Being a function of its arguments alone, a planner proposes the same list
    each time.
    """

    def __call__(
        self, cost: CostModel, *, batch_size: int, microbatch_size: int | None = None
    ) -> Iterable[StageGraph]:
        """Propose stage graphs.

        Args:
            cost: prices the operators of ``cost.graph`` on ``cost.cluster``.
            batch_size: samples of one step.
            microbatch_size: only this size; by default every power of two that the profile covers.

        Raises:
            InfeasiblePlanError: if nothing fits; the message says what would.
        """
        ...
