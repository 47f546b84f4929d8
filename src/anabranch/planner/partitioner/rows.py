"""What every contiguous range of a row of parts weighs, whatever the micro-batch size.

Ranges are [i, j), entries of (n + 1) x (n + 1) matrices. Each is the sum over values or parameters
of "counts for all ranges with i in one interval and j in another", so building all of them takes
four additions per value and two cumulative sums.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anabranch.cost import CostModel
from anabranch.graph.opgraph import Value, bits

Matrix = NDArray[np.float64]


@dataclass(frozen=True)
class Traffic:
    """Bytes that cross the border of every range or cut: ``per_sample * samples + fixed``."""

    per_sample: Matrix
    fixed: Matrix

    def at(self, samples: float | Matrix) -> Matrix:
        """Bytes for this many samples; for an array of counts, with axes of length 1 at its end."""
        scaled: Matrix = self.per_sample * samples
        return scaled + self.fixed if self.has_fixed else scaled

    def __getitem__(self, places: Any) -> Traffic:
        """Those of some ranges."""
        return Traffic(self.per_sample[places], self.fixed[places])

    @cached_property
    def has_fixed(self) -> bool:
        """Whether anything does not depend on the samples."""
        return bool(self.fixed.any())

    def plus(self, other: Traffic) -> Traffic:
        """Both together."""
        return Traffic(self.per_sample + other.per_sample, self.fixed + other.fixed)

    def minus(self, other: Traffic) -> Traffic:
        """This without the other."""
        return Traffic(self.per_sample - other.per_sample, self.fixed - other.fixed)


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
        self._ops = [list(bits(mask)) for mask in self.masks]
        self._place = {op: k for k, ops in enumerate(self._ops) for op in ops}
        self._seconds: dict[tuple[float, int], tuple[Matrix, Matrix]] = {}

    def mask(self, start: int, stop: int) -> int:
        """Operators of a range."""
        return self._first[stop] ^ self._first[start]

    @cached_property
    def _first(self) -> list[int]:
        """Operators of the first j parts."""
        return list(accumulate(self.masks, initial=0))

    def compute_s(self, samples: float, tensor: int = 1, *, recompute: bool = False) -> Matrix:
        """Forward and backward seconds of the first j parts, for j = 0 .. size."""
        key = samples, tensor
        if key not in self._seconds:
            forward, backward = self.cost.op_seconds(samples, tensor)
            self._seconds[key] = self._running(forward), self._running(forward + backward)
        once, both = self._seconds[key]
        return both + once if recompute else both

    def kept_bytes(self, tensor: int = 1) -> Matrix:
        """Bytes kept for the backward per sample by the first j parts."""
        return self._running(
            self.cost.kept_bytes if tensor == 1 else self.cost.sharded_kept_bytes(tensor)
        )

    def _running(self, per_op: NDArray[np.float64]) -> Matrix:
        sums = np.zeros(self.size + 1)
        order, starts = self._flat
        np.cumsum(np.add.reduceat(per_op[order], starts), out=sums[1:])
        return sums

    @cached_property
    def _flat(self) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """All operators, part after part, and where each part begins."""
        lengths = np.array([len(ops) for ops in self._ops], dtype=np.intp)
        order = np.array([op for ops in self._ops for op in ops], dtype=np.intp)
        return order, np.cumsum(lengths) - lengths

    @cached_property
    def reduced_bytes(self) -> Matrix:
        """Trainable parameters of every range: what replicas all-reduce."""
        return self._parameters(trainable=True)

    def reduced(self, tensor: int) -> Matrix:
        """``reduced_bytes`` on each of several devices that hold a replica together."""
        return self.reduced_bytes if tensor == 1 else self._sharded_parameters(tensor)

    def state_bytes(self, tensor: int = 1) -> Matrix:
        """Parameters, gradients and optimizer state of every range."""
        if tensor > 1:
            return self._sharded_parameters(tensor) * (2 + self.cost.optimizer_factor)
        return self._everything + self.reduced_bytes * (1 + self.cost.optimizer_factor)

    @cached_property
    def _everything(self) -> Matrix:
        if all(parameter.trainable for parameter in self.cost.graph.parameters):
            return self.reduced_bytes
        return self._parameters(trainable=False)

    def _sharded_parameters(self, tensor: int) -> Matrix:
        per_op = [
            self.cost.parameter_bytes([i], tensor=tensor) for i in range(len(self.cost.graph))
        ]
        sums = self._running(np.array(per_op, dtype=np.float64))
        return np.maximum(sums[None, :] - sums[:, None], 0.0)

    def _parameters(self, *, trainable: bool) -> Matrix:
        readers: dict[str, set[int]] = {}
        for op, place in self._place.items():
            for name in self.cost.graph.ops[op].parameters:
                readers.setdefault(name, set()).add(place)
        total = _Ranges(self.size)
        for name, places in readers.items():
            parameter = self.cost.parameters[name]
            if parameter.trainable or not trainable:
                total.add_read(parameter.nbytes, -1, sorted(places))
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
        if self._all_have_gradients:
            return self.leaving
        return self._traffic(entering=False, gradients=True)

    @cached_property
    def leaving_gradients(self) -> Traffic:
        """The gradients of what enters: they go back."""
        if self._all_have_gradients:
            return self.entering
        return self._traffic(entering=True, gradients=True)

    @cached_property
    def _all_have_gradients(self) -> bool:
        return all(value.grad for value, _, _ in self._values)

    def _traffic(self, *, entering: bool, gradients: bool) -> Traffic:
        per_sample, fixed = _Ranges(self.size), _Ranges(self.size)
        for value, made, read in self._values:
            if gradients and not value.grad:
                continue
            total = per_sample if value.batched else fixed
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
        if self._all_have_gradients:
            return self.comes
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
        for value, made, read in self._values:
            if made < 0 and (value.grad or not gradients):
                sums[0 if value.batched else 1, read[-1] + 1 :] += value.nbytes
        return Traffic(sums[0], sums[1])

    @cached_property
    def _values(self) -> list[tuple[Value, int, list[int]]]:
        """Values that cross a border, the place of their maker (-1: before), of their readers."""
        return list(self._find_values())

    def _find_values(self) -> Iterator[tuple[Value, int, list[int]]]:
        cost, place = self.cost, self._place
        for i in sorted({i for op in place for i in (*cost.made[op], *cost.read[op])}):
            value = cost.graph.values[i]
            made = place.get(value.producer, -1)
            read = sorted({place.get(op, self.size) for op in value.consumers})
            if read != [made]:
                yield value, made, read


class _Ranges:
    """Sums over many values of "add this to all ranges [i, j) with i and j in these intervals"."""

    def __init__(self, size: int) -> None:
        self._steps: list[tuple[float, int, int, int, int]] = []
        self._size = size

    def add_read(self, amount: float, made: int, read: Sequence[int]) -> None:
        """Ranges that hold one of the readers but not the maker."""
        last = made
        for place in read:
            if place > last:
                self._steps.append((amount, last + 1, place + 1, place + 1, self._size + 1))
                last = place

    def add_made(self, amount: float, made: int, last_read: int) -> None:
        """Ranges that hold the maker but not the last reader."""
        self._steps.append((amount, 0, made + 1, made + 1, last_read + 1))

    def matrix(self) -> Matrix:
        """The sums, [i, j]."""
        steps = np.zeros((self._size + 2, self._size + 2))
        if not self._steps:
            return steps[:-1, :-1]
        table = np.array(self._steps, dtype=np.float64)
        amount = table[:, 0]
        a, b, c, d = table[:, 1:].astype(np.intp).T
        np.add.at(steps, (a, c), amount)
        np.add.at(steps, (b, c), -amount)
        np.add.at(steps, (a, d), -amount)
        np.add.at(steps, (b, d), amount)
        return steps.cumsum(axis=0).cumsum(axis=1)[:-1, :-1]
