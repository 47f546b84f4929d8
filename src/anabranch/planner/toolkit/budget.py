"""A budget of the steps that a search may take."""

from __future__ import annotations

from dataclasses import dataclass

from anabranch.errors import BudgetError


@dataclass
class Budget:
    """Steps of a search, counted up to a limit.

    Attributes:
        planner: key of ``planner.PLANNERS``.
        remedies: advice for the error, how to take fewer steps or allow more.
    """

    planner: str
    limit: float
    remedies: str
    spent: float = 0.0

    def spend(self, steps: float) -> None:
        """Count steps; raises BudgetError beyond the limit."""
        self.spent += steps
        if self.spent > self.limit:
            raise BudgetError(
                f"planner {self.planner} has taken {self.spent:.2g} steps, its budget is "
                f"{self.limit:.2g}; {self.remedies}"
            )
