"""A budget of pipelines that a search may price."""

from __future__ import annotations

from dataclasses import dataclass

from anabranch.errors import BudgetError


@dataclass
class Budget:
    """Suffixes that may be priced: how many in all, and how many were."""

    total: int
    used: int = 0

    def spend(self, count: int, microbatch_size: int) -> None:
        """Take some, or raise BudgetError if there are not as many left."""
        self.used += count
        if self.used > self.total:
            raise BudgetError(
                f"planner dapple got to micro-batches of {microbatch_size} samples, would have "
                f"priced {self.used:,} pipelines there, and may price {self.total:,} in all: raise "
                "its option budget, lower width, set max_stages, give one micro-batch size, or "
                "capture the model in coarser operators"
            )
