"""DAPPLE's recursion (section 4.3) for one micro-batch size, over all cuts at once.

The paper plans the first layers and leaves the rest as one last stage, which it splits again and
again. Here the recursion runs the other way, the first stage is what is still split::

    [ 0 .. i )  one stage on all devices left  |  [ i .. ) planned, devices in use per machine

because Algorithm 1 finds the pivot from the back, and because a stage's distance to the end, on
which its memory depends, is then known. A state is (cut i, devices in use per machine, sorted). Its
``T_PL`` is L with the first i operators on all the other devices; the best of all T_PL is the plan.

L is no sum, so the best T_PL of a state need not lead to the best plan: while the first stage holds
most of the model on most of the devices, its all-reduce covers up whatever is behind it. So a
state keeps several suffixes: ``width`` with the least T_PL, as in the paper, ``width`` with the
least estimate of what can become of them (the rest evenly shared out, nothing reduced), and one of
the fewest stages, which needs least memory, so that a plan is found if any fits.

Suffixes that cannot beat the best plan are dropped: by the two lower bounds of
``dapple.objective``, with the work that is left shared out evenly over the devices that are left.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from anabranch.errors import BudgetError
from anabranch.planner.dapple.links import Place, hop_price, ring_price
from anabranch.planner.dapple.objective import NOTHING, Suffix
from anabranch.planner.dapple.placement import Machines, Step
from anabranch.planner.dapple.tables import Floats, Tables

Index = NDArray[np.intp]

EXACT = 1 + 1e-9
"""Room for rounding when a bound is compared with a latency."""


@dataclass(frozen=True)
class Chain:
    """A plan before it has operators' names.

    Attributes:
        latency_s: L.
        cuts: where each stage begins and the last ends: stages + 1 numbers.
        devices: per stage.
    """

    latency_s: float
    cuts: tuple[int, ...]
    devices: tuple[tuple[int, ...], ...]


@dataclass
class Budget:
    """Suffixes that may still be priced.

    Attributes:
        total: how many in all.
        used: how many so far.
    """

    total: int
    used: int = 0

    def spend(self, count: int, microbatch_size: int) -> None:
        """Take some.

        Raises:
            BudgetError: if there are not as many left.
        """
        self.used += count
        if self.used > self.total:
            raise BudgetError(
                f"planner dapple would price {self.used:,} stages or more, at micro-batches of "
                f"{microbatch_size} samples, and may price {self.total:,}: raise its option "
                "budget, set max_stages or a smaller width, give the micro-batch size, or capture "
                "the model in coarser operators"
            )


@dataclass
class Labels:
    """Suffixes, one per entry of every array.

    Attributes:
        start: first operator. stages: number of stages.
        nbytes, gradients: what the first stage reads from before it and sends back, in bytes.
        peak: F + B of the slowest stage or transfer.
        place: number of the first stage's place.
        source, parent, step: number of the state before the first stage was added, the label there,
            and the step from there.
    """

    start: Index
    stages: Index
    nbytes: Floats
    gradients: Floats
    peak: Floats
    place: Index
    source: Index
    parent: Index
    step: Index
    suffix: Suffix

    def take(self, chosen: Index | NDArray[np.bool_]) -> Labels:
        """Some of them."""
        return Labels(
            *(getattr(self, each.name)[chosen] for each in fields(self)[:-1]),
            pick(self.suffix, chosen),
        )

    @staticmethod
    def join(parts: Sequence[Labels]) -> Labels:
        """All of them."""
        names = [each.name for each in fields(Labels)[:-1]]
        suffixes = [
            np.concatenate([getattr(part.suffix, each.name) for part in parts])
            for each in fields(Suffix)
        ]
        columns = (np.concatenate([getattr(part, name) for part in parts]) for name in names)
        return Labels(*columns, Suffix(*suffixes))


def pick(suffix: Suffix, chosen: Index | NDArray[np.bool_]) -> Suffix:
    """Some entries of a suffix of arrays."""
    return Suffix(*(getattr(suffix, each.name)[chosen] for each in fields(Suffix)))
