"""The branches of a block side by side: what they require together, however the devices are shared.

For one choice of what follows, the branches are rows of numbers per device count. Runs of whole
branches may be one stage, so the branches are taken in order, and a run is taken at its end.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from anabranch.planner.partitioner.chains import Block
from anabranch.planner.partitioner.configured.prices import NEVER, Ints
from anabranch.planner.partitioner.configured.shapes import Shape
from anabranch.planner.partitioner.configured.states import Arithmetic, Passed


@dataclass(frozen=True)
class Together:
    """The branches of a block for some choices of what follows, all of one shape.

    Attributes:
        arithmetic: of the states.
        block: the block.
        passed: how it was solved.
        mine: the choices.
        head: how much of the branches a stage before the block holds; by default nothing.
        alike: instead of what they require, what the first stages hold, all of one configuration.
        leads: nothing comes before, so that only what is possible matters, and arrays have one
            configuration.
    """

    arithmetic: Arithmetic
    block: Block
    passed: Passed
    mine: Ints
    head: Shape | None = None
    alike: bool = False
    leads: bool = False

    def share(self, config: slice = slice(None)) -> list[Ints]:
        """What the first branches require together, for none to all of them.

        Args:
            config: of which configurations.

        Returns:
            Arrays [config, choice, devices].
        """
        tables = [table[config] for table in self.tables()]
        runs = {place: run[config] for place, run in self.runs().items()}
        best = [np.zeros_like(tables[0])]
        for m, table in enumerate(tables, start=1):
            now = self.arithmetic.combine(best[m - 1], table)
            for (i, j), run in runs.items():
                if j == m:
                    now = np.minimum(now, self.arithmetic.combine(best[i], run))
            best.append(now)
        return best

    @property
    def shape(self) -> Shape:
        """How much of the branches the first stage behind the block holds."""
        return self.passed.shapes[int(self.passed.choices.shape[self.mine[0]])]

    def tables(self) -> list[Ints]:
        """What each branch requires: [config, choice, devices]."""
        columns = self.passed.choices.column[self.mine]
        result = []
        for b, k in enumerate(self.block.classes):
            branch = self.passed.branches[k, self.shape.cuts[b]]
            cut = self.head.cuts[b] if self.head else 0
            if not self.alike:
                table = branch.required[cut][:, columns]
            else:
                # A branch that the stage behind holds as a whole has no first stage: row 0 of
                # ``first`` says never.
                table = np.minimum(branch.first[cut], branch.alike[cut])[:, columns]
            result.append(_lead(table) if self.leads else table)
        return result

    def runs(self) -> dict[tuple[int, int], Ints]:
        """What runs of whole branches require, by first branch and end."""
        cuts = self.shape.cuts
        sizes = [len(branch.items) for branch in self.block.branches]
        left = [stop - (self.head.cuts[b] if self.head else 0) for b, stop in enumerate(cuts)]
        columns = self.passed.choices.column[self.mine]
        after = next(iter(self.passed.branches.values())).after[:, columns]
        shape = (1, *after.shape, self.arithmetic.devices + 1)
        pool = np.broadcast_to(after[None, ..., None], shape)
        result = {}
        for (i, j), offers in self.passed.groups.items():
            if left[i:j] == sizes[i:j]:
                table = self.arithmetic.least(offers, self.arithmetic.hold(offers, pool))
                table = table if self.alike else self.arithmetic.require(table)
                result[i, j] = _lead(table) if self.leads else table
        return result


def _lead(table: Ints) -> Ints:
    """Whatever the configuration of what comes before: there is nothing."""
    return np.where(table.min(axis=0, keepdims=True) < NEVER, 0, NEVER)
