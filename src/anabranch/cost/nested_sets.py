"""Bytes and seconds of all stages between nested sets of operators.

A stage is the difference between a set and a smaller set inside it::

    lower = {a, b1}    upper = {a, b1, b2, c1}    stage = {b2, c1}

Figures that add up over operators are differences of two sums, one per set. Other figures depend on
the readers that come after a set:

    enters    a value made in lower, with fewer readers to come after upper than after lower
    leaves    a value made in upper, not in lower, with readers to come after upper
    is held   a tied parameter that enters, as if it had been made before all

Values of operators outside all sets are taken as made before the first set, and these operators
read after the last.

Pairs of sets are listed; the traffic of all pairs with the same ``lower`` is a product of matrices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anabranch.cost.footprint import Border, Number, ParameterBytes, StageFootprint, Traffic
from anabranch.cost.model import CostModel
from anabranch.graph.opgraph import BATCH, bits
from anabranch.remembered import remembered

Floats = NDArray[np.float64]
Ints = NDArray[np.integer[Any]]

_ROWS = 4096
"""Number of sets whose sums are taken at once."""

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
        """Return pairs at a mask, ascending indices or a slice."""
        return Pairs(self.lower[keep], self.upper[keep])

    def difference(self, per_set: NDArray[Any]) -> NDArray[Any]:
        """Return a sum per stage, from a sum per set."""
        return np.asarray(per_set[self.upper] - per_set[self.lower])


class NestedSets:
    """Sets of operators and the stages between them.

    Args:
        sets: bit masks, ascending by size, from the empty set to one that contains all others.
    """

    def __init__(self, cost: CostModel, sets: Sequence[int]) -> None:
        self.cost = cost
        self.sets = tuple(sets)

    @staticmethod
    def row(cost: CostModel, parts: Sequence[int]) -> NestedSets:
        """Return the unions of the first 0, 1, 2, ... parts; parts may also be parallel."""
        return NestedSets(cost, tuple(accumulate(parts, initial=0)))

    def __len__(self) -> int:
        return len(self.sets)

    @cached_property
    def parts(self) -> tuple[int, ...]:
        """Operators that each set has beyond the set before; for chains only."""
        return tuple(after ^ before for before, after in pairwise(self.sets))

    def mask(self, lower: int, upper: int) -> int:
        """Return the bit mask of a stage between two sets."""
        return self.sets[upper] & ~self.sets[lower]

    @cached_property
    def is_chain(self) -> bool:
        """True if each set lies inside the next."""
        return not any(before & ~after for before, after in pairwise(self.sets))

    @remembered
    def seconds(self, samples: float) -> tuple[Floats, Floats]:
        """Return forward and backward seconds of every set."""
        forward, backward = self.cost.op_seconds(samples)
        return self.sums(forward), self.sums(backward)

    def compute_s(self, samples: float, *, recompute: bool = False) -> Floats:
        """Seconds of a forward and a backward of every set; with recomputation of two forwards."""
        forward, backward = self.seconds(samples)
        return forward * (1 + recompute) + backward

    @cached_property
    def kept_bytes(self) -> Floats:
        """Bytes per sample that every set keeps for the backward."""
        return self.sums(self.cost.kept_bytes)

    @cached_property
    def kept_fixed_bytes(self) -> Floats:
        """Bytes that every set keeps whatever the number of samples."""
        return self.sums(self.cost.kept_fixed_bytes)

    @cached_property
    def parameter_bytes(self) -> ParameterBytes[Floats]:
        """Bytes of the parameters of every set, without tied ones."""
        return ParameterBytes(*map(self.sums, self.cost.own_parameter_bytes))

    def sums(self, per_op: Floats) -> Floats:
        """Sum a figure per operator over the operators of each set."""
        if self.is_chain:
            operators, starts = self._flat
            sums = np.zeros(len(self))
            np.cumsum(np.add.reduceat(per_op[operators], starts), out=sums[1:])
            return sums
        rows = range(0, len(self), _ROWS)
        return np.concatenate([self._members[i : i + _ROWS] @ per_op for i in rows])

    @cached_property
    def _flat(self) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """All operators, part after part, and the start of each part."""
        members = [list(bits(part)) for part in self.parts]
        lengths = np.array([len(operators) for operators in members], dtype=np.intp)
        assert lengths.all(), "reduceat takes no empty parts"
        flat = np.array([op for operators in members for op in operators], dtype=np.intp)
        return flat, np.cumsum(lengths) - lengths

    @cached_property
    def _members(self) -> NDArray[np.uint8]:
        """1 where a set holds an operator: [set, operator]."""
        count = len(self.cost.graph)
        width = -(-count // 8)
        raw = b"".join(mask.to_bytes(width, "little") for mask in self.sets)
        packed = np.frombuffer(raw, dtype=np.uint8).reshape(len(self), width)
        return np.unpackbits(packed, axis=1, count=count, bitorder="little")

    @cached_property
    def nested(self) -> NDArray[np.bool_]:
        """True where a set is a proper subset of another: [lower, upper]."""
        if self.is_chain:
            return np.triu(np.ones((len(self), len(self)), dtype=bool), 1)
        members = self._members.astype(np.float64)
        outside = members @ (1 - members).T
        return np.asarray((outside == 0) & ~np.eye(len(self), dtype=bool))

    @remembered
    def stages(self, lowest: int | None = None) -> tuple[Pairs, StageFootprint]:
        """Stages between any two sets, or only above the first ``lowest`` ones, and their bytes."""
        lower, upper = np.nonzero(self.nested[:lowest])
        pairs = Pairs(lower.astype(np.int32), upper.astype(np.int32))
        return pairs, self.between(pairs)

    @cached_property
    def matrices(self) -> StageFootprint:
        """Bytes of the stages between any two sets: [lower, upper]; 0 where not ``nested``."""
        lower, upper = np.nonzero(self.nested)
        # The first pair is an empty stage, which stands where sets are not nested.
        pairs = Pairs(*(np.concatenate([[0], at]).astype(np.int32) for at in (lower, upper)))
        place = np.zeros(self.nested.shape, dtype=np.intp)
        place[lower, upper] = np.arange(1, len(pairs))
        return self.between(pairs)[place]

    def passes(self, pairs: Pairs, samples: float) -> Floats:
        """Return the bytes of a pass (``StagePasses``) of the stages between some pairs of sets."""
        cost = self.cost
        own = cost.largest_gradients + cost.working_bytes * samples
        kept = cost.kept_bytes * samples + cost.kept_fixed_bytes
        return self._fullest(pairs, own, kept, cost.tied_gradients)

    def _fullest(
        self, pairs: Pairs, own: Floats, kept: Floats, tied: Sequence[tuple[int, float]] = ()
    ) -> Floats:
        """Solve the recurrence of ``StagePasses`` for all pairs, by the bytes that each operator
        takes itself and keeps; gradients of ``tied`` parameters wait for their first reader.

        Without these, for a chain in the order of the model, or in any order where nothing is kept,
        pass(i) is ``max over j <= i (own[j] + kept up to j) - kept up to i``.
        """
        if not tied and self.is_chain and (not kept.any() or (np.diff(self._flat[0]) > 0).all()):
            operators, starts = self._flat
            done = np.zeros(len(self.cost.graph))
            done[operators] = np.cumsum(kept[operators])
            most = np.zeros((len(self), len(self)))
            if len(starts):
                of_parts = np.maximum.reduceat((own + done)[operators], starts)
                from_each = np.triu(np.broadcast_to(of_parts, (len(of_parts),) * 2))
                most[:-1, 1:] = np.maximum.accumulate(from_each, axis=1)
            most -= self.sums(kept)
            return np.asarray(np.maximum(most, 0.0)[pairs.lower, pairs.upper])
        fullest = np.zeros(pairs.lower.shape)
        users = [np.array(list(bits(mask))) for mask, _ in tied]
        read = [pairs.difference(self._members[:, ops]) for ops in users]
        for op in np.flatnonzero(own + kept):
            inside = np.nonzero(pairs.difference(self._members[:, op]))
            waiting, summed = np.zeros((2, len(inside[0])))
            for ops, has, (_, nbytes) in zip(users, read, tied, strict=True):
                if ops[0] <= op < ops[-1]:
                    sides = (has[..., side].max(-1) for side in (ops <= op, ops > op))
                    waits = np.minimum(*sides)[inside]  # for an operator here or before
                    waiting += waits * float(nbytes)
                    summed = np.maximum(summed, waits * float(nbytes * (op in ops)))
            fullest[inside] = np.maximum(fullest[inside] - kept[op], own[op] + waiting + summed)
        return fullest

    def between(self, pairs: Pairs, border: Border | None = None) -> StageFootprint:
        """Bytes of the stages between some pairs of sets; pass ``border`` if it is known."""
        held = ParameterBytes(*map(pairs.difference, self.parameter_bytes))
        for (_, parameter), left in zip(self.cost.tied, self._tied_to_come.T, strict=True):
            used = left[pairs.lower] > left[pairs.upper]
            for kind, nbytes in zip(held, self.cost.parameter_bytes(parameter), strict=True):
                kind += used * nbytes
        return StageFootprint(
            held,
            pairs.difference(self.kept_bytes),
            border or self.border(pairs),
            self._fullest(pairs, self.cost.largest_gradients, np.zeros(len(self.cost.graph))),
            _PairPasses(self, pairs),
            pairs.difference(self.kept_fixed_bytes),
        )

    @cached_property
    def _tied_to_come(self) -> NDArray[np.int16]:
        """Number of readers of each tied parameter outside each set: [set, parameter]."""
        return self._to_come([tuple(bits(users)) for users, _ in self.cost.tied])

    def border(self, pairs: Pairs) -> Border:
        """Return the bytes that cross the borders of the stages between some pairs of sets."""
        made, left, nbytes = self._values
        enter, leave = np.empty((_KINDS, len(pairs))), np.empty((_KINDS, len(pairs)))
        for lower, start, stop in _runs(pairs.lower):
            live = np.flatnonzero(made[lower] & (left[lower] > 0))
            upper = pairs.upper[start:stop]
            after = left[upper[:, None], live]
            # Of values made before the stage and read later: those that no operator of the stage
            # reads, and those that some operator behind the stage reads.
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
        """Bytes of the values that are made in each set and read later: [set, column].

        Columns are bytes per sample, fixed bytes, and the same for gradients.
        """
        made, left, nbytes = self._values
        rows = range(0, len(self), _ROWS)
        return np.concatenate(
            [(made[i : i + _ROWS] & (left[i : i + _ROWS] > 0)) @ nbytes for i in rows]
        )

    @cached_property
    def _values(self) -> tuple[NDArray[np.bool_], NDArray[np.int16], Floats]:
        """Per set and value, whether the set makes it and its readers outside; bytes as columns."""
        values = [
            value
            for value, readers in zip(self.cost.graph.values, self.cost.value_readers, strict=True)
            if readers and value.producer != BATCH
            if self.sets[-1] & (readers | 1 << value.producer)
        ]
        producers = [value.producer for value in values]
        outside = [not self.sets[-1] >> op & 1 for op in producers]
        nbytes = np.zeros((len(values), _KINDS))
        for i, value in enumerate(values):
            nbytes[i, 0 if value.batched else 1] = value.nbytes
            nbytes[i, 2 if value.batched else 3] = value.nbytes * value.grad
        made = self._members[:, producers].astype(np.bool_) | np.array(outside, dtype=np.bool_)
        return made, self._to_come([value.consumers for value in values]), nbytes

    def _to_come(self, readers: Sequence[Sequence[int]]) -> NDArray[np.int16]:
        """Return the number of readers in each group that are outside each set: [set, group]."""
        counts = np.array([len(ops) for ops in readers], dtype=np.int16)
        flat = [op for ops in readers for op in ops]
        starts = np.cumsum(counts, dtype=np.intp) - counts
        inside = np.add.reduceat(self._members[:, flat], starts, axis=1, dtype=np.int16)
        return np.asarray(counts - inside)


@dataclass(frozen=True)
class _PairPasses:
    """Passes of the stages between some pairs of sets."""

    sets: NestedSets
    pairs: Pairs

    def at(self, samples: Number) -> Floats:
        """Return the bytes of the passes; for an array of counts stacked: [count, pair]."""
        if np.ndim(samples) == 0:
            return self._at(float(samples))
        return np.stack([self._at(float(count)) for count in np.ravel(samples)])

    @remembered
    def _at(self, samples: float) -> Floats:
        return self.sets.passes(self.pairs, samples)

    def __getitem__(self, places: Any) -> _PairPasses:
        """Return passes of some of the pairs."""
        return _PairPasses(self.sets, self.pairs[places])


def run_starts(ascending: Ints) -> NDArray[np.int64]:
    """Return the starts of the runs of equal entries in an ascending array."""
    changes = np.flatnonzero(ascending[1:] != ascending[:-1]) + 1
    return np.concatenate([[0] if len(ascending) else [], changes]).astype(np.int64)


def _runs(ascending: Ints) -> Iterator[tuple[int, int, int]]:
    """Generate the runs of equal entries: (entry, start, stop)."""
    for start, stop in pairwise([*run_starts(ascending).tolist(), len(ascending)]):
        yield int(ascending[start]), start, stop
