"""Bytes and seconds of all stages between nested sets of operators.

A stage is what one set has beyond a smaller one inside it::

    lower = {a, b1}    upper = {a, b1, b2, c1}    stage = {b2, c1}

What adds up over operators is the difference of two sums, one per set. For the rest it matters who
is still to come after a set:

    enters    a value made in lower, with fewer readers to come after upper than after lower
    leaves    a value made in upper, not in lower, with readers to come after upper
    is held   a tied parameter that enters, as if it had been made before all

What operators outside all sets make is there before the first set, and they read after the last.

Where each set lies inside the next, each value counts for all pairs (i, j) with i in one interval
and j in another: four additions per value and two cumulative sums make the matrix [i, j]. For other
sets the pairs are listed, and those of one ``lower`` are a product of matrices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anabranch.cost.model import CostModel
from anabranch.cost.stage_weights import Border, Held, Number, StageWeights, Traffic
from anabranch.graph.opgraph import BATCH, Parameter, Value, bits

Floats = NDArray[np.float64]
Ints = NDArray[np.integer[Any]]

_ROWS = 4096
"""Sets whose sums are taken at once."""

_KINDS = 4
"""Columns of bytes: per sample and fixed, of values and of their gradients."""


@dataclass(frozen=True)
class Pairs:
    """Stages as nested pairs of sets by their indices, ascending by ``lower``."""

    lower: Ints
    upper: Ints

    def __len__(self) -> int:
        return len(self.lower)

    def __getitem__(self, keep: NDArray[Any] | slice) -> Pairs:
        """Those that a mask, ascending indices or a slice name."""
        return Pairs(self.lower[keep], self.upper[keep])

    def same(self, other: Pairs) -> bool:
        """Whether these are the same pairs."""
        return np.array_equal(self.lower, other.lower) and np.array_equal(self.upper, other.upper)

    def difference(self, per_set: Floats) -> Floats:
        """What the stages add to a sum per set."""
        return np.asarray(per_set[self.upper] - per_set[self.lower])


class NestedSets:
    """Sets of operators and the stages between them.

    Args:
        sets: bit masks, ascending by size, from the empty one to one that holds all others.
    """

    def __init__(self, cost: CostModel, sets: Sequence[int]) -> None:
        self.cost = cost
        self.sets = tuple(sets)
        self._seconds: dict[tuple[float, int], tuple[Floats, Floats]] = {}
        self._kept: dict[int, Floats] = {}
        self._own: dict[int, Held[Floats]] = {}
        self._matrices: dict[int, StageWeights] = {}

    @staticmethod
    def row(cost: CostModel, parts: Sequence[int]) -> NestedSets:
        """The first 0, 1, 2 .. of a row of parts, which may also lie side by side."""
        return NestedSets(cost, tuple(accumulate(parts, initial=0)))

    def __len__(self) -> int:
        return len(self.sets)

    @cached_property
    def parts(self) -> tuple[int, ...]:
        """What each set has beyond the one before, where each lies inside the next."""
        return tuple(after ^ before for before, after in pairwise(self.sets))

    def mask(self, lower: int, upper: int) -> int:
        """Operators of a stage."""
        return self.sets[upper] & ~self.sets[lower]

    @cached_property
    def is_chain(self) -> bool:
        """Whether each set lies inside the next."""
        return not any(before & ~after for before, after in pairwise(self.sets))

    def seconds(self, samples: float, tensor: int = 1) -> tuple[Floats, Floats]:
        """Forward and backward seconds of every set."""
        if (samples, tensor) not in self._seconds:
            forward, backward = self.cost.op_seconds(samples, tensor)
            self._seconds[samples, tensor] = self.sums(forward), self.sums(backward)
        return self._seconds[samples, tensor]

    def compute_s(self, samples: float, tensor: int = 1, *, recompute: bool = False) -> Floats:
        """Seconds of every set, the forward once more with recomputation."""
        forward, backward = self.seconds(samples, tensor)
        return forward * (1 + recompute) + backward

    def kept_bytes(self, tensor: int = 1) -> Floats:
        """Bytes kept for the backward per sample by every set."""
        if tensor not in self._kept:
            self._kept[tensor] = self.sums(self.cost.kept_bytes(tensor))
        return self._kept[tensor]

    def parameter_bytes(self, tensor: int = 1) -> Held[Floats]:
        """Bytes of the parameters of every set, but for tied ones."""
        if tensor not in self._own:
            self._own[tensor] = Held(*map(self.sums, self.cost.own_parameter_bytes(tensor)))
        return self._own[tensor]

    def sums(self, per_op: Floats) -> Floats:
        """Per set, the sum over its operators of a figure per operator."""
        if self.is_chain:
            operators, starts = self._flat
            sums = np.zeros(len(self))
            np.cumsum(np.add.reduceat(per_op[operators], starts), out=sums[1:])
            return sums
        rows = range(0, len(self), _ROWS)
        return np.concatenate([self._members[i : i + _ROWS] @ per_op for i in rows])

    @cached_property
    def _flat(self) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """All operators, part after part, and where each part begins."""
        members = [list(bits(part)) for part in self.parts]
        lengths = np.array([len(operators) for operators in members], dtype=np.intp)
        assert lengths.all(), "reduceat takes no empty parts"
        flat = np.array([op for operators in members for op in operators], dtype=np.intp)
        return flat, np.cumsum(lengths) - lengths

    @cached_property
    def _members(self) -> NDArray[np.uint8]:
        """Per set and operator, 1 if the set holds it."""
        count = len(self.cost.graph)
        width = -(-count // 8)
        raw = b"".join(mask.to_bytes(width, "little") for mask in self.sets)
        packed = np.frombuffer(raw, dtype=np.uint8).reshape(len(self), width)
        return np.unpackbits(packed, axis=1, count=count, bitorder="little")

    @cached_property
    def nested(self) -> NDArray[np.bool_]:
        """Whether one set lies inside another and is not the same: [lower, upper]."""
        if self.is_chain:
            return np.triu(np.ones((len(self), len(self)), dtype=bool), 1)
        members = self._members.astype(np.float64)
        outside = members @ (1 - members).T
        return np.asarray((outside == 0) & ~np.eye(len(self), dtype=bool))

    def matrices(self, tensor: int = 1) -> StageWeights:
        """Bytes of the stages between any two sets, [lower, upper]; meaningless where the one is
        not inside the other.
        """
        if tensor not in self._matrices:
            make = self._chain if self.is_chain else self._scattered
            self._matrices[tensor] = make(tensor)
        return self._matrices[tensor]

    def _scattered(self, tensor: int) -> StageWeights:
        at = np.nonzero(self.nested)
        weights = self.between(Pairs(*(where.astype(np.int32) for where in at)), tensor)

        def matrix(entries: Floats) -> Floats:
            result = np.zeros((len(self), len(self)))
            result[at] = entries
            return result

        border = weights.border
        return StageWeights(
            matrix(weights.parameters),
            matrix(weights.trainable),
            matrix(weights.kept),
            Border(
                *(
                    Traffic(matrix(kind.per_sample), matrix(kind.fixed))
                    for kind in (
                        border.entering,
                        border.leaving,
                        border.entering_gradients,
                        border.leaving_gradients,
                    )
                )
            ),
            matrix(weights.largest),
            matrix(weights.largest_gradient),
            matrix(weights.tables),
            matrix(weights.rows),
            _MatrixPasses(self, tensor),
        )

    # Each set inside the next: matrices [lower, upper]

    def _chain(self, tensor: int) -> StageWeights:
        held = Held(*map(_between, self.parameter_bytes(tensor)))
        if tensor == 1 and self.cost.tied:
            held = Held(*map(np.add, held, self._tied))
        largest = self._chain_most(self.cost.largest_gradients(tensor, dense=True))
        return StageWeights(
            held.parameters,
            held.trainable,
            _between(self.kept_bytes(tensor)),
            self._chain_border,
            largest,
            self._chain_most(self.cost.largest_gradients(tensor)) if held.rows.any() else largest,
            held.tables,
            held.rows,
            _MatrixPasses(self, tensor),
        )

    def _chain_most(self, per_op: Floats) -> Floats:
        """The most that one operator has, of those between two sets: [lower, upper]."""
        operators, starts = self._flat
        most = np.zeros((len(self), len(self)))
        if len(starts):
            of_parts = np.maximum.reduceat(per_op[operators], starts)
            from_each = np.triu(np.broadcast_to(of_parts, (len(of_parts),) * 2))
            most[:-1, 1:] = np.maximum.accumulate(from_each, axis=1)
        return most

    @cached_property
    def _tied(self) -> Held[Floats]:
        sums = Held(*(_Ranges(len(self)) for _ in range(4)))
        for users, parameter in self.cost.tied:
            places = sorted({self._place[op] for op in bits(users) if op in self._place})
            for kind, nbytes in zip(sums, self.cost.held_bytes(parameter), strict=True):
                kind.add_entering(nbytes, -1, places)
        return Held(*(kind.matrix() for kind in sums))

    def pass_matrix(self, samples: float, tensor: int) -> Floats:
        """Bytes of a pass (``cost.passes``) of the stages between two sets: [lower, upper].

        Of a row in the model's order pass(i) is the most of g + (w + k up to there) n so far, less
        all that is kept up to i.
        """
        if not self._is_in_order:
            at = np.nonzero(self.nested)
            result = np.zeros((len(self), len(self)))
            result[at] = self.pair_passes(Pairs(*at), samples, tensor)
            return result
        own, kept = self._pass_terms(samples, tensor)
        operators, _ = self._flat
        done = np.zeros(len(self.cost.graph))
        done[operators] = np.cumsum(kept[operators])
        after = self.sums(kept)
        return np.maximum(self._chain_most(own + done) - after, 0.0)

    def pair_passes(self, pairs: Pairs, samples: float, tensor: int) -> Floats:
        """The same of some pairs of sets."""
        if self._is_in_order:
            return np.asarray(self.pass_matrix(samples, tensor)[pairs.lower, pairs.upper])
        found = np.zeros(len(pairs))
        own, kept = self._pass_terms(samples, tensor)
        for op in np.flatnonzero(own + kept):
            member = self._members[:, op]
            inside = np.flatnonzero(member[pairs.upper] > member[pairs.lower])
            found[inside] = np.maximum(found[inside] - kept[op], own[op])
        return found

    def _pass_terms(self, samples: float, tensor: int) -> tuple[Floats, Floats]:
        """Per operator, what a pass of it takes itself and what it keeps."""
        own = self.cost.largest_gradients(tensor) + self.cost.working_bytes(tensor) * samples
        return own, self.cost.kept_bytes(tensor) * samples

    @cached_property
    def _is_in_order(self) -> bool:
        """Whether each set lies inside the next, and the operators come in the model's order."""
        return self.is_chain and bool((np.diff(self._flat[0]) > 0).all())

    @cached_property
    def _place(self) -> dict[int, int]:
        """Per operator, the part that it is in."""
        return {op: place for place, part in enumerate(self.parts) for op in bits(part)}

    @cached_property
    def _chain_border(self) -> Border:
        entering, leaving = self._traffic(gradients=False)
        if all(value.grad for value, _, _ in self._crossing):
            return Border(entering, leaving, leaving, entering)
        leaving_gradients, entering_gradients = self._traffic(gradients=True)
        return Border(entering, leaving, entering_gradients, leaving_gradients)

    def _traffic(self, *, gradients: bool) -> tuple[Traffic, Traffic]:
        """What enters and what leaves; or the gradients of both."""
        entering, leaving = ([_Ranges(len(self)), _Ranges(len(self))] for _ in range(2))
        for value, made, read in self._crossing:
            if value.grad or not gradients:
                kind = int(not value.batched)
                inside = [place for place in read if place < len(self) - 1]
                entering[kind].add_entering(value.nbytes, made, inside)
                if made >= 0:
                    leaving[kind].add_leaving(value.nbytes, made, read[-1])
        return (
            Traffic(entering[0].matrix(), entering[1].matrix()),
            Traffic(leaving[0].matrix(), leaving[1].matrix()),
        )

    @cached_property
    def _crossing(self) -> list[tuple[Value, int, list[int]]]:
        """Values that cross a border, the part of their maker (-1: before), of their readers."""
        found, cost, place = [], self.cost, self._place
        for i in sorted({i for op in place for i in (*cost.made[op], *cost.read[op])}):
            value = cost.graph.values[i]
            made = place.get(value.producer, -1)
            read = sorted({place.get(op, len(self) - 1) for op in value.consumers})
            if read != [made]:
                found.append((value, made, read))
        return found

    # Any sets: listed pairs

    def between(self, pairs: Pairs, tensor: int = 1, border: Border | None = None) -> StageWeights:
        """Bytes of the stages between some pairs of sets, whose border may be known."""
        held = Held(*map(pairs.difference, self.parameter_bytes(tensor)))
        for left, parameter in self._tied_to_come if tensor == 1 else ():
            used = left[pairs.lower] > left[pairs.upper]
            for kind, nbytes in zip(held, self.cost.held_bytes(parameter), strict=True):
                kind += used * nbytes
        largest = self._most(pairs, self.cost.largest_gradients(tensor, dense=True))
        return StageWeights(
            held.parameters,
            held.trainable,
            pairs.difference(self.kept_bytes(tensor)),
            border or self.border(pairs),
            largest,
            self._most(pairs, self.cost.largest_gradients(tensor)) if held.rows.any() else largest,
            held.tables,
            held.rows,
            _PairPasses(self, pairs, tensor),
        )

    def _most(self, pairs: Pairs, per_op: Floats) -> Floats:
        """The most that one operator has, of those between each pair of sets."""
        result = np.zeros(len(pairs))
        for nbytes in np.unique(per_op[per_op > 0]):
            held = self._members[:, per_op == nbytes].sum(axis=1, dtype=np.int32)
            result[held[pairs.upper] > held[pairs.lower]] = nbytes
        return result

    @cached_property
    def _tied_to_come(self) -> list[tuple[NDArray[np.int16], Parameter]]:
        """Per set, how many operators that read a tied parameter are to come; the parameter."""
        return [
            (self._to_come(list(bits(users))), parameter) for users, parameter in self.cost.tied
        ]

    def border(self, pairs: Pairs) -> Border:
        """What crosses the borders of the stages between some pairs of sets."""
        made, left, nbytes = self._values
        enter, leave = np.empty((_KINDS, len(pairs))), np.empty((_KINDS, len(pairs)))
        for lower, start, stop in _runs(pairs.lower):
            live = np.flatnonzero(made[lower] & (left[lower] > 0))
            upper = pairs.upper[start:stop]
            after = left[upper[:, None], live]
            # Of what is made before the stage and read later: what no operator of the stage reads,
            # what some operator behind the stage reads.
            untouched = (after == left[lower, live]).astype(np.float64) @ nbytes[live]
            passed_on = (after > 0).astype(np.float64) @ nbytes[live]
            enter[:, start:stop] = (self.open_bytes[lower] - untouched).T
            leave[:, start:stop] = (self.open_bytes[upper] - passed_on).T
        return Border(
            Traffic(enter[0], enter[1]),
            Traffic(leave[0], leave[1]),
            Traffic(leave[2], leave[3]),
            Traffic(enter[2], enter[3]),
        )

    def least_traffic(self, pairs: Pairs) -> NDArray[np.float32]:
        """Bytes per sample that cross the border of each stage either way, rounded downwards."""
        made, left, nbytes = self._values
        both = nbytes[:, 0] + nbytes[:, 2]
        held = self.open_bytes[:, 0] + self.open_bytes[:, 2]
        result = np.empty(len(pairs), dtype=np.float32)
        for lower, start, stop in _runs(pairs.lower):
            live = np.flatnonzero(made[lower] & (left[lower] > 0))
            upper = pairs.upper[start:stop]
            after = left[upper[:, None], live]
            inside = (after == left[lower, live]) @ both[live] + (after > 0) @ both[live]
            result[start:stop] = held[lower] + held[upper] - inside
        result *= np.float32(1 - 1e-6)
        return result

    @cached_property
    def open_bytes(self) -> Floats:
        """Per set, bytes of the values that are made in it and read later.

        Columns are bytes per sample, fixed bytes, and the same of gradients.
        """
        made, left, nbytes = self._values
        rows = range(0, len(self), _ROWS)
        return np.concatenate(
            [(made[i : i + _ROWS] & (left[i : i + _ROWS] > 0)) @ nbytes for i in rows]
        )

    @cached_property
    def _values(self) -> tuple[NDArray[np.bool_], NDArray[np.int16], Floats]:
        """Per set and value whether it is made and how many readers are to come; its bytes."""
        values = [v for v in self.cost.graph.values if v.producer != BATCH and v.consumers]
        made = np.zeros((len(self), len(values)), dtype=np.bool_)
        left = np.zeros((len(self), len(values)), dtype=np.int16)
        nbytes = np.zeros((len(values), _KINDS))
        for i, value in enumerate(values):
            outside = not self.sets[-1] >> value.producer & 1
            made[:, i] = outside | self._members[:, value.producer]
            left[:, i] = self._to_come(value.consumers)
            nbytes[i, 0 if value.batched else 1] = value.nbytes
            nbytes[i, 2 if value.batched else 3] = value.nbytes * value.grad
        return made, left, nbytes

    def _to_come(self, operators: Sequence[int]) -> NDArray[np.int16]:
        inside = self._members[:, list(operators)].sum(axis=1, dtype=np.int16)
        return np.asarray(np.int16(len(operators)) - inside)


@dataclass(frozen=True)
class _MatrixPasses:
    """Passes of the stages between any two sets, [lower, upper]."""

    sets: NestedSets
    tensor: int

    def at(self, samples: Number) -> Floats:
        """Bytes of the passes; an array of counts comes with two more axes of one entry each."""
        if np.ndim(samples) == 0:
            return self.sets.pass_matrix(float(samples), self.tensor)
        return np.stack([self.at(count) for count in np.ravel(samples)])


@dataclass(frozen=True)
class _PairPasses:
    """Passes of the stages between some pairs of sets."""

    sets: NestedSets
    pairs: Pairs
    tensor: int

    def at(self, samples: Number) -> Floats:
        """Bytes of the passes."""
        return self.sets.pair_passes(self.pairs, float(samples), self.tensor)

    def __getitem__(self, places: Any) -> _PairPasses:
        """Those of some of the pairs."""
        return _PairPasses(self.sets, self.pairs[places], self.tensor)


class _Ranges:
    """Sums over many values of "add this to all ranges [i, j) with i and j in these intervals"."""

    def __init__(self, sets: int) -> None:
        self._steps: list[tuple[float, int, int, int, int]] = []
        self._sets = sets

    def add_entering(self, amount: float, made: int, read: Sequence[int]) -> None:
        """Ranges that hold one of the readers but not the maker."""
        last = made
        for place in read:
            if place > last:
                self._steps.append((amount, last + 1, place + 1, place + 1, self._sets))
                last = place

    def add_leaving(self, amount: float, made: int, last_read: int) -> None:
        """Ranges that hold the maker but not the last reader."""
        self._steps.append((amount, 0, made + 1, made + 1, last_read + 1))

    def matrix(self) -> Floats:
        """The sums, [i, j]."""
        steps = np.zeros((self._sets + 1, self._sets + 1))
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


def _between(per_set: Floats) -> Floats:
    """What every stage adds to a sum per set: [lower, upper]."""
    return per_set[None, :] - per_set[:, None]


def run_starts(ascending: Ints) -> NDArray[np.int64]:
    """Where each run of equal entries of an ascending array starts."""
    changes = np.flatnonzero(ascending[1:] != ascending[:-1]) + 1
    return np.concatenate([[0] if len(ascending) else [], changes]).astype(np.int64)


def _runs(ascending: Ints) -> Iterator[tuple[int, int, int]]:
    """Runs of equal entries: entry, start, stop."""
    for start, stop in pairwise([*run_starts(ascending).tolist(), len(ascending)]):
        yield int(ascending[start]), start, stop
