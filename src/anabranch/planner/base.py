"""The contract of every planner."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import ClassVar, NamedTuple, Protocol

from anabranch.cost import CostModel
from anabranch.plans.stages import StageGraph


class Planner(Protocol):
    """Proposes stage graphs for a model on a cluster, best first by its own objective.

    A proposal uses every device of ``cost.cluster`` and leaves ``in_flight`` to the schedule. It
    passes ``plans.check``, with operators across samples as soon as ``plans.whole_batch.fitted``
    has made stages for them; one of planner ``auto`` may need replicas that share the optimizer's
    state for that. ``anabranch.solve.plan`` does both, schedules and simulates the proposals and
    keeps the best. Being a function of its arguments alone, a planner proposes the same list each
    time.

    A planner that searches for long yields plans as it finds them, so that an interrupted search
    still has one. It may propose a stage graph twice.

    Attributes:
        schedules: keys of ``schedule.SCHEDULES`` that its paper runs such plans with.
    """

    schedules: ClassVar[tuple[str, ...]]

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
            BudgetError: if the search would take more than its budget.
        """


class RunOptions(NamedTuple):
    """Way to run a stage graph, beside its schedule.

    Attributes:
        shared: whether replicas share the optimizer's state.
        split: whether backwards are split.
    """

    shared: bool = False
    split: bool = False


PLAIN_RUN = RunOptions()
"""Every replica holds its optimizer's state, and backwards are whole."""


def require_options(name: str, planner: object, **least: int | float) -> None:
    """Refuse options out of range, as early as they are set.

    None passes; the type of an option says whether it may be None.

    Args:
        name: key of ``planner.PLANNERS``.
        planner: planner with the options as attributes.
        least: option -> its least value; no option takes infinity or NaN.

    Raises:
        ValueError: names the first option that is out of range, its value and the range.
    """
    for option, bound in least.items():
        value = getattr(planner, option)
        # Written so that NaN, which compares with nothing, is refused as well.
        if value is not None and not bound <= value < math.inf:
            raise ValueError(
                f"option {option} of planner {name} is {value}; it must be a finite number of "
                f"at least {bound}"
            )
