"""Footprint of a stage: its bytes, whatever the micro-batch. Numbers, or arrays of many stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from anabranch.compiled import Floats
from anabranch.graph.opgraph import bits

Number = Any
"""A float, or a NumPy array of them."""


class PassBytes(Protocol):
    """Bytes that a pass of a stage takes besides kept bytes, see ``StagePasses``."""

    def at(self, samples: Number) -> Number:
        """Return the bytes for this many samples; an array of counts broadcasts."""


@dataclass(frozen=True)
class Traffic:
    """Bytes that cross a border: ``per_sample * samples + fixed``."""

    per_sample: Number
    fixed: Number

    def at(self, samples: Number) -> Number:
        """Return the bytes for this many samples; an array of counts broadcasts."""
        scaled = self.per_sample * samples
        return scaled + self.fixed if self.has_fixed else scaled

    @cached_property
    def has_fixed(self) -> bool:
        """True if some bytes may not depend on the samples."""
        return not isinstance(self.fixed, np.ndarray) or bool(self.fixed.any())

    def __getitem__(self, places: Any) -> Traffic:
        """Return traffic of some stages."""
        return Traffic(self.per_sample[places], self.fixed[places])

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.per_sample + other.per_sample, self.fixed + other.fixed)


@dataclass(frozen=True)
class Border:
    """Traffic across the border of a stage; a value counts once in each direction.

    Attributes:
        entering: values read inside and made outside; the batch is at hand everywhere.
        leaving: values made inside and read outside.
        entering_gradients: gradients of the leaving values, which come back.
        leaving_gradients: gradients of the entering values, which go back.
    """

    entering: Traffic
    leaving: Traffic
    entering_gradients: Traffic
    leaving_gradients: Traffic

    @cached_property
    def comes(self) -> Traffic:
        return self.entering + self.entering_gradients

    @cached_property
    def goes(self) -> Traffic:
        return self.leaving + self.leaving_gradients

    def __getitem__(self, places: Any) -> Border:
        """Return borders of some stages."""
        return Border(*(getattr(self, kind.name)[places] for kind in fields(self)))


def summed_bytes(trainable: Number, tables: Number, rows: Number) -> Number:
    """Return the bytes of gradients in a ring; for rows, of a ring as long as their exchange."""
    return trainable - tables + rows / 2


def touched_bytes(trainable: Number, tables: Number, rows: Number) -> Number:
    """Return the most bytes of parameters that an update changes; of tables, rows of a batch."""
    return trainable - tables + np.minimum(tables, rows)


Bytes = TypeVar("Bytes")
"""A number, or an array with an entry per operator or set of them."""


class ParameterBytes(NamedTuple, Generic[Bytes]):
    """Bytes of parameters.

    Attributes:
        parameters: bytes of all parameters.
        trainable: bytes of trained parameters.
        tables: bytes of trained tables whose gradients are rows.
        rows: bytes of these gradients in a whole batch.
    """

    parameters: Bytes
    trainable: Bytes
    tables: Bytes
    rows: Bytes

    @property
    def summed(self) -> Bytes:
        """Bytes of gradients in a ring, see ``summed_bytes``."""
        summed: Bytes = summed_bytes(self.trainable, self.tables, self.rows)
        return summed

    @property
    def gradient(self) -> Bytes:
        """Bytes of gradients in memory; of tables, rows of a batch."""
        gradient: Bytes = self.trainable - self.tables + self.rows  # type: ignore[operator]
        return gradient

    def of(self, places: Any) -> ParameterBytes[Any]:
        """Return the bytes of some operators or sets."""
        return ParameterBytes(*(nbytes[places] for nbytes in self))  # type: ignore[index]


@dataclass(frozen=True)
class StageFootprint:
    """Bytes of a stage, or of many, from which the price of any micro-batch follows.

    Attributes:
        held: bytes of its parameters, each counted once.
        kept: bytes per sample that its operators keep for their backward.
        border: traffic across its border.
        largest_gradient: bytes of the largest gradient of one parameter.
        passes: bytes that a pass of its operators takes besides kept bytes.
        kept_fixed: bytes that its operators keep besides ``kept``, whatever the number of samples.
    """

    held: ParameterBytes[Number]
    kept: Number
    border: Border
    largest_gradient: Number = 0.0
    passes: PassBytes = Traffic(0.0, 0.0)
    kept_fixed: Number = 0.0

    def __getitem__(self, places: Any) -> StageFootprint:
        """Return footprints of some stages."""
        held, *others = (getattr(self, kind.name) for kind in fields(self))
        return StageFootprint(held.of(places), *(part[places] for part in others))


def pass_behind(before: float, kept: float, own: float) -> float:
    """Return pass(i) of ``StagePasses``, from pass(i - 1) and bytes of operator i."""
    return max(before - kept, own)


@dataclass(frozen=True, slots=True)
class StagePasses:
    """Bytes that a pass of one stage takes besides the bytes its operators keep for their backward.

    For operators i in the order of the model, on n samples::

        k_i    bytes per sample that the operator keeps
        f_i    bytes that it keeps besides, whatever the number of samples
        w_i    bytes per sample that its forward or its backward takes besides, while it runs
        g_i    bytes of the largest gradient of one of its parameters, before it is added, and of
               those of tied ones that wait (``waiting``)

        pass(i) = max(pass(i - 1) - k_i n - f_i,  g_i + w_i n)

    Bytes that operator i keeps are not there yet when the operators before it run their forwards,
    and are gone when these run their backwards. So an embedding's gradient, the last to be made, is
    as large as its table, but takes the place of all that the other operators had kept. The last
    pass(i) is ``max(fixed + per_sample * n)`` over the operators.
    """

    fixed: Floats
    per_sample: Floats

    @staticmethod
    def of(gradients: Floats, working: Floats, kept: Floats, kept_fixed: Floats) -> StagePasses:
        """Solve the recurrence for g_i, w_i, k_i and f_i of a stage's operators."""
        fixed, per_sample = (
            own - (nbytes.sum() - np.cumsum(nbytes))
            for own, nbytes in ((gradients, kept_fixed), (working, kept))
        )
        return StagePasses(fixed, per_sample)

    @staticmethod
    def waiting(mask: int, tied: Sequence[tuple[int, float]]) -> Floats:
        """Return the bytes that gradients of tied parameters take in the backward of each operator
        of a set, besides the gradient that it makes.

        A gradient that a later operator has made waits for the first reader, and the sum of two is
        a third tensor, of one parameter at a time.

        Args:
            tied: bit mask of the readers of each parameter, and bytes of its gradient.
        """
        waiting, summed = np.zeros((2, mask.bit_count()))
        places = {op: i for i, op in enumerate(bits(mask))}
        for users, nbytes in tied:
            *read, last = [places[op] for op in bits(users & mask)] or [0]
            if read:
                waiting[read[0] : last] += nbytes
                summed[read] = np.maximum(summed[read], nbytes)
        return waiting + summed

    def at(self, samples: Number) -> Number:
        """Return the bytes for this many samples, or for each count of an array."""
        lines = self.fixed + np.multiply.outer(samples, self.per_sample)
        return np.maximum(lines.max(axis=-1, initial=0.0), 0.0)
