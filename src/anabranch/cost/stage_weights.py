"""Bytes of stages, whatever the micro-batch size: numbers for one stage, arrays for many."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

Number = Any
"""A float, or a NumPy array of them."""


@dataclass(frozen=True)
class Traffic:
    """Bytes that cross a border: ``per_sample * samples + fixed``."""

    per_sample: Number
    fixed: Number

    def at(self, samples: Number) -> Number:
        """Bytes for this many samples; for an array of counts, with axes that broadcast."""
        scaled = self.per_sample * samples
        return scaled + self.fixed if self.has_fixed else scaled

    @cached_property
    def has_fixed(self) -> bool:
        """Whether anything may not depend on the samples."""
        return not isinstance(self.fixed, np.ndarray) or bool(self.fixed.any())

    def __getitem__(self, places: Any) -> Traffic:
        """Those of some stages."""
        return Traffic(self.per_sample[places], self.fixed[places])

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.per_sample + other.per_sample, self.fixed + other.fixed)

    def __sub__(self, other: Traffic) -> Traffic:
        return Traffic(self.per_sample - other.per_sample, self.fixed - other.fixed)


@dataclass(frozen=True)
class Border:
    """What crosses the border of a stage; a value counts once in each direction.

    Attributes:
        entering: values that are read and come from outside; the batch is at hand everywhere.
        leaving: values that are made and read outside.
        entering_gradients: of what leaves; they come back.
        leaving_gradients: of what enters; they go back.
    """

    entering: Traffic
    leaving: Traffic
    entering_gradients: Traffic
    leaving_gradients: Traffic

    @cached_property
    def comes(self) -> Traffic:
        """All that comes in, values and gradients."""
        return self.entering + self.entering_gradients

    @cached_property
    def goes(self) -> Traffic:
        """All that goes out, values and gradients."""
        if self.entering is self.leaving_gradients and self.leaving is self.entering_gradients:
            return self.comes
        return self.leaving + self.leaving_gradients

    def __getitem__(self, places: Any) -> Border:
        """Those of some stages."""
        return Border(
            self.entering[places],
            self.leaving[places],
            self.entering_gradients[places],
            self.leaving_gradients[places],
        )


@dataclass(frozen=True)
class StageWeights:
    """What a stage holds on each device of a replica.

    Attributes:
        parameters: bytes of its parameters, each counted once.
        trainable: bytes of those that are trained.
        kept: bytes per sample that its operators keep for their backward.
        border: what crosses its border.
        largest: bytes of the largest parameter that is trained.
        tables: bytes of trained tables whose gradients are rows (``CostModel.row_bytes``).
        rows: bytes of the gradients of these, of a whole batch.
        largest_gradient: bytes of the largest gradient of one parameter, if that is another.
        working: bytes per sample that a pass of one of its operators takes besides what all of them
            keep, at most.
        training: likewise, of its operators with trained parameters.
    """

    parameters: Number
    trainable: Number
    kept: Number
    border: Border
    largest: Number = 0.0
    tables: Number = 0.0
    rows: Number = 0.0
    largest_gradient: Number | None = None
    working: Number = 0.0
    training: Number = 0.0

    @property
    def summed(self) -> Number:
        """Bytes of gradients in a ring, or those of a ring that takes as long as the rows."""
        return self.trainable - self.tables + self.rows / 2

    def __getitem__(self, places: Any) -> StageWeights:
        """Those of some stages."""
        return StageWeights(
            self.parameters[places],
            self.trainable[places],
            self.kept[places],
            self.border[places],
            self.largest[places],
            working=self.working[places],
            training=self.training[places],
        )
