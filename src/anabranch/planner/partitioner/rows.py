"""What every contiguous range of a row of parts weighs, whatever the micro-batch size.

Ranges are [i, j), entries of (n + 1) x (n + 1) matrices. Each is the sum over values or parameters
of "counts for all ranges with i in one interval and j in another", so building all of them takes
four additions per value and two cumulative sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from anabranch.cost import CostModel
from anabranch.graph.opgraph import bits

Matrix = NDArray[np.float64]


@dataclass(frozen=True)
class Traffic:
    """Bytes that cross the border of every range or cut: ``per_sample * samples + fixed``."""

    per_sample: Matrix
    fixed: Matrix

    def at(self, samples: float) -> Matrix:
        """Bytes for this many samples."""
        return (
            self.per_sample * samples + self.fixed
            if self._has_fixed
            else (self.per_sample * samples)
        )

    @cached_property
    def _has_fixed(self) -> bool:
        return bool(self.fixed.any())

    def plus(self, other: Traffic) -> Traffic:
        """Both together."""
        return Traffic(self.per_sample + other.per_sample, self.fixed + other.fixed)


class Row:
    """What every contiguous range of a row of parts weighs.

    Args:
        cost: prices the operators. masks: the parts, as bit masks of operators. Whatever they
            read comes from earlier parts or from before the row, whatever reads them is later or
            after it; parts may also lie side by side.
    """

    def __init__(self, cost: CostModel, masks: Sequence[int]) -> None:
        self.cost = cost
        self.masks = tuple(masks)
        self.size = len(self.masks)
        self._place = {op: k for k, mask in enumerate(self.masks) for op in bits(mask)}

    def mask(self, start: int, stop: int) -> int:
        """Operators of a range."""
        result = 0
        for mask in self.masks[start:stop]:
            result |= mask
        return result

    def compute_s(self, samples: float) -> NDArray[np.float64]:
        """Forward and backward seconds of the first j parts, for j = 0 .. size."""
        forward, backward = self.cost.op_seconds(samples)
        return self._running(forward + backward)

    @cached_property
    def kept_bytes(self) -> NDArray[np.float64]:
        """Bytes kept for the backward per sample by the first j parts."""
        return self._running(self.cost.kept_bytes)

    def _running(self, per_op: NDArray[np.float64]) -> NDArray[np.float64]:
        sums = [float(per_op[list(bits(mask))].sum()) for mask in self.masks]
        return np.concatenate([[0.0], np.cumsum(sums)])

    @cached_property
    def state_bytes(self) -> Matrix:
        """Parameters, gradients and optimizer state of every range."""
        everything = self._parameters(trainable=False)
        return everything + self.reduced_bytes * (1 + self.cost.optimizer_factor)

    @cached_property
    def reduced_bytes(self) -> Matrix:
        """Trainable parameters of every range: what replicas all-reduce."""
        return self._parameters(trainable=True)

    def _parameters(self, *, trainable: bool) -> Matrix:
        readers: dict[str, set[int]] = {}
        for op, place in self._place.items():
            for name in self.cost.graph.ops[op].parameters:
                readers.setdefault(name, set()).add(place)
        total = _Ranges(self.size)
        for parameter in self.cost.graph.parameters:
            if parameter.name in readers and (parameter.trainable or not trainable):
                total.add_read(parameter.nbytes, -1, sorted(readers[parameter.name]))
        return total.matrix()

    @cached_property
    def entering(self) -> Traffic:
        """What every range reads from outside."""
        return self._traffic(entering=True, gradients=False)

    @cached_property
    def leaving(self) -> Traffic:
        """What every range makes for others."""
        return self._traffic(entering=False, gradients=False)

    @cached_property
    def entering_gradients(self) -> Traffic:
        """The gradients of what leaves: they come back."""
        return self._traffic(entering=False, gradients=True)

    @cached_property
    def leaving_gradients(self) -> Traffic:
        """The gradients of what enters: they go back."""
        return self._traffic(entering=True, gradients=True)

    def _traffic(self, *, entering: bool, gradients: bool) -> Traffic:
        per_sample, fixed = _Ranges(self.size), _Ranges(self.size)
        for i in self._values:
            value = self.cost.graph.values[i]
            if gradients and not value.grad:
                continue
            total = per_sample if value.batched else fixed
            made = self._place.get(value.producer, -1)
            read = sorted({self._place.get(op, self.size) for op in value.consumers})
            if entering:
                total.add_read(value.nbytes, made, [place for place in read if place < self.size])
            elif made >= 0:
                total.add_made(value.nbytes, made, read[-1])
        return Traffic(per_sample.matrix(), fixed.matrix())

    @cached_property
    def comes(self) -> Traffic:
        """What enters every range and the gradients that come back to it."""
        return self.entering.plus(self.entering_gradients)

    @cached_property
    def goes(self) -> Traffic:
        """What leaves every range and the gradients that go back from it."""
        return self.leaving.plus(self.leaving_gradients)

    @cached_property
    def sole_reads(self) -> Traffic:
        """Per cut, what comes from outside and is read by nothing after the cut."""
        return self._sole(gradients=False)

    @cached_property
    def sole_gradients(self) -> Traffic:
        """Per cut, the gradients of ``sole_reads``."""
        return self._sole(gradients=True)

    def _sole(self, *, gradients: bool) -> Traffic:
        sums = np.zeros((2, self.size + 1))
        for i in self._values:
            value = self.cost.graph.values[i]
            if value.producer in self._place or (gradients and not value.grad):
                continue
            last = max(self._place.get(op, self.size) for op in value.consumers)
            sums[0 if value.batched else 1, last + 1 :] += value.nbytes
        return Traffic(sums[0], sums[1])

    @cached_property
    def _values(self) -> list[int]:
        found = {i for op in self._place for i in (*self.cost.made[op], *self.cost.read[op])}
        return sorted(found)


class _Ranges:
    """Sums over many values of "add this to all ranges [i, j) with i and j in these intervals"."""

    def __init__(self, size: int) -> None:
        self._steps = np.zeros((size + 2, size + 2))
        self._size = size

    def _add(self, amount: float, starts: tuple[int, int], stops: tuple[int, int]) -> None:
        (a, b), (c, d) = starts, stops
        self._steps[a, c] += amount
        self._steps[b, c] -= amount
        self._steps[a, d] -= amount
        self._steps[b, d] += amount

    def add_read(self, amount: float, made: int, read: Sequence[int]) -> None:
        """Ranges that hold one of the readers but not the maker."""
        last = made
        for place in read:
            if place > last:
                self._add(amount, (last + 1, place + 1), (place + 1, self._size + 1))
                last = place

    def add_made(self, amount: float, made: int, last_read: int) -> None:
        """Ranges that hold the maker but not the last reader."""
        self._add(amount, (0, made + 1), (made + 1, last_read + 1))

    def matrix(self) -> Matrix:
        """The sums, [i, j]."""
        return self._steps.cumsum(axis=0).cumsum(axis=1)[:-1, :-1]
