"""The contract of every planner."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import ClassVar, Protocol, runtime_checkable

from anabranch.cost import CostModel
from anabranch.plans.stages import StageGraph


class Planner(Protocol):
    """Proposes stage graphs for a model on a cluster, best first by its own objective.

    A proposal uses every device of ``cost.cluster``, passes ``plans.check`` and leaves
    ``in_flight`` to the schedule. ``anabranch.solve.plan`` schedules and simulates the proposals
    and keeps the best. Being a function of its arguments alone, a planner proposes the same list
    each time.

    A planner that searches for long yields what it has as it goes, so that whoever interrupts the
    search still has a plan; it may propose a stage graph twice.

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
            BudgetError: if the search would take more than it was given.
        """
        ...


@runtime_checkable
class Improver(Protocol):
    """A planner that knows what to try next, once it is known which of its proposals is best."""

    def neighbourhood(
        self, cost: CostModel, batch_size: int, microbatch_size: int | None
    ) -> Callable[[StageGraph], Iterable[StageGraph]]:
        """A function from a stage graph to others that differ little from it, promising ones first.

        Args:
            cost: as for ``Planner``.
            batch_size: as for ``Planner``.
            microbatch_size: as for ``Planner``.
        """
        ...


def require_options(planner: str, found: object, **least: int | float) -> None:
    """Refuse options out of range, as early as they are set.

    None passes: whether an option may be None is a matter of its type.

    Args:
        planner: key of ``planner.PLANNERS``.
        found: has the options as attributes.
        least: per option the least value it takes; no option takes infinity or NaN.

    Raises:
        ValueError: names the first option that is out of range, its value and the range.
    """
    for option, bound in least.items():
        value = getattr(found, option)
        # Written so that NaN, which compares with nothing, is refused as well.
        if value is not None and not bound <= value < math.inf:
            raise ValueError(
                f"option {option} of planner {planner} is {value}; it must be a finite number of "
                f"at least {bound}"
            )
