"""What Piper's recurrence runs over: downsets, pairs of nested ones, and sums over both.

A stage is what one downset has beyond a smaller one::

    lo = {a, b1}    hi = {a, b1, b2, c1}    stage = {b2, c1}

Most of what a stage costs adds up over its operators, so it is the difference of two sums, one per
downset. Three things do not: a value enters once however many operators of the stage read it, it
leaves once however many read it later, and a tied parameter is held once. They follow from how
many readers (users) of it are still to come after either downset:

    enters    made in lo, and fewer readers to come after hi than after lo
    leaves    made in hi but not in lo, and readers to come after hi
    is used   fewer users to come after hi than after lo
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anabranch.cost import CostModel
from anabranch.errors import BudgetError
from anabranch.graph.opgraph import BATCH

Floats = NDArray[np.float64]
Ints = NDArray[np.int32]

_ROWS = 4096
"""Downsets whose sums are taken at once."""


@dataclass(frozen=True)
class Pairs:
    """Nested pairs of downsets by their indices, ascending by ``lo``."""

    lo: Ints
    hi: Ints

    def __len__(self) -> int:
        return len(self.lo)

    def take(self, keep: NDArray[Any] | slice) -> Pairs:
        """Those that a mask, ascending indices or a slice name."""
        return Pairs(self.lo[keep], self.hi[keep])

    def same(self, other: Pairs) -> bool:
        """Whether these are the same pairs."""
        return np.array_equal(self.lo, other.lo) and np.array_equal(self.hi, other.hi)


@dataclass(frozen=True)
class Borders:
    """What crosses the border of each stage, in bytes; per sample, and independent of samples.

    Attributes:
        enter, enter_fixed: values that enter, each once.
        gradients, gradients_fixed: gradients that come back for values that leave.
        traffic, traffic_fixed: all that crosses in either direction, gradients included.
        tied, tied_trainable: bytes of parameters that several operators of the model share.
    """

    enter: Floats
    enter_fixed: Floats
    gradients: Floats
    gradients_fixed: Floats
    traffic: Floats
    traffic_fixed: Floats
    tied: Floats
    tied_trainable: Floats

    def take(self, keep: NDArray[Any]) -> Borders:
        """Those of the stages that a mask or indices name."""
        return Borders(*(getattr(self, each.name)[keep] for each in fields(self)))


@dataclass(frozen=True)
class Space:
    """What is searched: downsets, pairs of them, and what at least crosses between each."""

    states: States
    pairs: Pairs
    traffic: NDArray[np.float32]

    @staticmethod
    def of(cost: CostModel, masks: Sequence[int], budget: int) -> Space:
        """All nested pairs of these downsets, ascending by size.

        Raises:
            BudgetError: if there are more than ``budget``.
        """
        states = States(cost, masks)
        pairs = states.nested(budget)
        return Space(states, pairs, states.traffic(pairs))


class States:
    """Downsets, ascending by size, with what is needed to price the stages between them."""

    def __init__(self, cost: CostModel, masks: Sequence[int]) -> None:
        self.cost = cost
        self.masks = masks
        n = len(cost.graph)
        width = -(-n // 8)
        raw = b"".join(mask.to_bytes(width, "little") for mask in masks)
        packed = np.frombuffer(raw, dtype=np.uint8).reshape(len(masks), width)
        self._members = np.unpackbits(packed, axis=1, count=n, bitorder="little")
        sizes = self._members.sum(axis=1, dtype=np.int64)
        self._last: tuple[Pairs, Borders] | None = None
        self.starts = np.flatnonzero(np.diff(sizes, prepend=-1))
        """Index of the first downset of each size."""

    def __len__(self) -> int:
        return len(self.masks)

    def sums(self, each: Floats) -> Floats:
        """Per downset, the sum over its operators of a figure per operator."""
        rows = range(0, len(self), _ROWS)
        return np.concatenate([self._members[i : i + _ROWS] @ each for i in rows])

    def nested(self, budget: int) -> Pairs:
        """All nested pairs.

        Raises:
            BudgetError: if there are more than ``budget``.
        """
        width = -(-self._members.shape[1] // 64) * 64
        bits = np.zeros((len(self), width), dtype=np.uint8)
        bits[:, : self._members.shape[1]] = self._members
        words = np.packbits(bits, axis=1, bitorder="little").view(np.uint64)
        columns = [np.ascontiguousarray(column) for column in words.T]
        above: list[Ints] = []
        count = 0
        bounds = [*self.starts.tolist(), len(self)]
        for start, stop in pairwise(bounds):
            for lo in range(start, stop):
                hi = _supersets(columns, lo, stop)
                above.append(hi)
                count += len(hi)
                if count > budget:
                    raise BudgetError(
                        f"{self.cost.graph.name or 'the model'} has {len(self):,} downsets and at "
                        f"least {count:,} nested pairs of them, more than the budget of "
                        f"{budget:,} pairs; capture it in coarser operators, take planner "
                        "graphpipe, put the operators in a row (linear=True), or allow more pairs"
                    )
        lengths = [len(hi) for hi in above]
        lo_of = np.repeat(np.arange(len(self), dtype=np.int32), lengths)
        return Pairs(lo_of, np.concatenate(above) if above else lo_of)

    @cached_property
    def _values(self) -> tuple[NDArray[np.bool_], NDArray[np.int16], Floats]:
        """Made in a downset; readers to come after it; bytes in four columns.

        The columns are bytes per sample, fixed bytes, and the same of gradients.
        """
        values = [v for v in self.cost.graph.values if v.producer != BATCH and v.consumers]
        made = np.zeros((len(self), len(values)), dtype=np.bool_)
        left = np.zeros((len(self), len(values)), dtype=np.int16)
        nbytes = np.zeros((len(values), 4))
        for i, value in enumerate(values):
            made[:, i] = self._members[:, value.producer]
            left[:, i] = self._to_come(value.consumers)
            nbytes[i, 0 if value.batched else 1] = value.nbytes
            nbytes[i, 2 if value.batched else 3] = value.nbytes * value.grad
        return made, left, nbytes

    def _to_come(self, ops: Sequence[int]) -> NDArray[np.int16]:
        inside = self._members[:, list(ops)].sum(axis=1, dtype=np.int16)
        result: NDArray[np.int16] = np.int16(len(ops)) - inside
        return result

    @cached_property
    def _users(self) -> dict[str, list[int]]:
        """Per parameter, the operators that read it."""
        users: dict[str, list[int]] = {}
        for i, op in enumerate(self.cost.graph.ops):
            for name in dict.fromkeys(op.parameters):
                users.setdefault(name, []).append(i)
        return users

    @cached_property
    def own_bytes(self) -> tuple[Floats, Floats]:
        """Per operator, bytes of the parameters that no other shares; of the trainable."""
        total, trainable = np.zeros(len(self.cost.graph)), np.zeros(len(self.cost.graph))
        for name, (first, *others) in self._users.items():
            if not others:
                parameter = self.cost.parameters[name]
                total[first] += parameter.nbytes
                trainable[first] += parameter.nbytes * parameter.trainable
        return total, trainable

    @cached_property
    def _held(self) -> Floats:
        """Per downset, bytes of the values that it made and that are read later; four columns."""
        made, left, nbytes = self._values
        rows = range(0, len(self), _ROWS)
        return np.concatenate(
            [(made[i : i + _ROWS] & (left[i : i + _ROWS] > 0)) @ nbytes for i in rows]
        )

    def traffic(self, pairs: Pairs) -> NDArray[np.float32]:
        """Bytes per sample that cross the border of each stage either way, at most."""
        made, left, nbytes = self._values
        both = nbytes[:, 0] + nbytes[:, 2]
        held = self._held[:, 0] + self._held[:, 2]
        result = np.empty(len(pairs), dtype=np.float32)
        for lo, start, stop in _rows(pairs.lo):
            live = np.flatnonzero(made[lo] & (left[lo] > 0))
            hi = pairs.hi[start:stop]
            after = left[hi[:, None], live]
            inside = (after == left[lo, live]) @ both[live] + (after > 0) @ both[live]
            result[start:stop] = held[lo] + held[hi] - inside
        # Rounded downwards.
        result *= np.float32(1 - 1e-6)
        return result

    def known_borders(self, pairs: Pairs) -> Borders:
        """``borders``; those of the last pairs are known, which often come up again."""
        known = self._last
        if known is None or not known[0].same(pairs):
            known = self._last = pairs, self.borders(pairs)
        return known[1]

    def borders(self, pairs: Pairs) -> Borders:
        """What crosses the borders of the stages between pairs of downsets."""
        made, left, nbytes = self._values
        held = self._held
        enter = np.empty((len(pairs), 4))
        leave = np.empty((len(pairs), 4))
        for lo, start, stop in _rows(pairs.lo):
            live = np.flatnonzero(made[lo] & (left[lo] > 0))
            hi = pairs.hi[start:stop]
            after = left[hi[:, None], live]
            # Of what lo holds for later: what no operator of the stage reads; what some operator
            # behind the stage reads.
            untouched = (after == left[lo, live]).astype(np.float64) @ nbytes[live]
            passed_on = (after > 0).astype(np.float64) @ nbytes[live]
            enter[start:stop] = held[lo] - untouched
            leave[start:stop] = held[hi] - passed_on
        tied, tied_trainable = self._tied_bytes(pairs)
        return Borders(
            enter=enter[:, 0].copy(),
            enter_fixed=enter[:, 1].copy(),
            gradients=leave[:, 2].copy(),
            gradients_fixed=leave[:, 3].copy(),
            traffic=enter[:, 0] + enter[:, 2] + leave[:, 0] + leave[:, 2],
            traffic_fixed=enter[:, 1] + enter[:, 3] + leave[:, 1] + leave[:, 3],
            tied=tied,
            tied_trainable=tied_trainable,
        )

    def _tied_bytes(self, pairs: Pairs) -> tuple[Floats, Floats]:
        total, trainable = np.zeros(len(pairs)), np.zeros(len(pairs))
        for name, ops in self._users.items():
            if len(ops) > 1:
                to_come = self._to_come(ops)
                parameter = self.cost.parameters[name]
                used = (to_come[pairs.lo] != to_come[pairs.hi]) * float(parameter.nbytes)
                total += used
                trainable += used * parameter.trainable
        return total, trainable


def _supersets(columns: Sequence[NDArray[np.uint64]], lo: int, first: int) -> Ints:
    """Indices from ``first`` on of the downsets that hold downset ``lo``."""
    found = np.flatnonzero(columns[0][first:] & columns[0][lo] == columns[0][lo])
    for column in columns[1:]:
        found = found[column[first:][found] & column[lo] == column[lo]]
    return (found + first).astype(np.int32)


def _rows(lo: Ints) -> Iterator[tuple[int, int, int]]:
    """Runs of equal entries of an ascending array: entry, start, stop."""
    for start, stop in pairwise([*runs(lo).tolist(), len(lo)]):
        yield int(lo[start]), start, stop


def runs(ascending: Ints) -> NDArray[np.int64]:
    """Where each run of equal entries starts."""
    if not len(ascending):
        return np.zeros(0, dtype=np.int64)
    changes = np.flatnonzero(ascending[1:] != ascending[:-1])
    return np.concatenate([[0], changes + 1])
