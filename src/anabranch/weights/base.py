"""Weight policies: which weights the passes of asynchronous training read.

A *unit* is a mini-batch. Its gradient makes version n + 1 of a stage's weights from version n, so
unit n is about to be learned when n updates have been made. Without a flush a stage runs the
forward of unit n before the units ahead of it have been learned::

    stage 0 of 3    F0 F1 F2 B0 F3 B1 F4 B2      F3 sees version 1, B3 comes at version 3: lag 2
    stage 1            F0 F1 B0 F2 B1 F3 B2      F3 sees version 2:                        lag 1
    stage 2               F0 B0 F1 B1 F2 B2      F3 sees version 3:                        lag 0

A policy says which weights a forward and a backward read, in place of the current ones. It is a
pure function of the unit; runtime, simulator and memory counts ask the same object.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, slots=True)
class Unit:
    """A mini-batch at one stage.

    Attributes:
        number: n, the number of mini-batches before it.
        filled: K, the first mini-batch since the pipeline was last empty; all stages were at
            version K then.
        in_flight: w, units that the stage may have between forward and backward, this one included;
            on a stage graph with one unit more per stage edge, the longest distance to the sink
            plus 1.
        deepest: W, the largest ``in_flight`` of all stages, that of a source; with one unit more
            per stage edge, the depth of the pipeline.
    """

    number: int
    filled: int
    in_flight: int
    deepest: int

    @property
    def lag(self) -> int:
        """Updates of the stage between the forward and the backward of this unit."""
        return min(self.in_flight - 1, self.number - self.filled)

    @property
    def seen(self) -> int:
        """v, the current version at the forward."""
        return self.number - self.lag


@dataclass(frozen=True, slots=True)
class Reading:
    """Weights that a pass reads.

    Attributes:
        version: number of updates after which the stage had these weights.
        ahead: updates by which the weights are extrapolated, 0 for none.
    """

    version: int
    ahead: int = 0


class WeightPolicy:
    """Weights that forwards and backwards of one stage read.

    Policies are frozen dataclasses, whose fields are their options, and so compare by value.

    Attributes:
        name: key in ``weights.POLICIES``.
        microbatches: whether an update takes the gradients of several micro-batches, which all
            stages then run through without a flush.
        corrections: corrections of stale gradients in the updates of a stage, the outermost first:
            name (``runtime.asynchronous.corrections``) -> copies of the weights that it keeps.
    """

    __slots__ = ()
    name: ClassVar[str]
    microbatches: ClassVar[bool] = False
    corrections: ClassVar[Mapping[str, int]] = {}

    def forward(self, unit: Unit) -> Reading:
        """Return the reading of the forward: ``unit.seen``, where predictions start, or earlier."""
        raise NotImplementedError

    def backward(self, unit: Unit) -> Reading:
        """Return the reading of the backward: that of the forward (the default), whose weights are
        then kept, or one of the current weights, with ``unit.number`` as ``version``.
        """
        return self.forward(unit)
