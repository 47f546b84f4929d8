"""What lies between any two states of the model, whatever the micro-batch size.

A state is a set of operators that are done: with every operator, all that it depends on. States
are numbered from the empty one to the whole model, by size; a span (u, v) with u inside v is the
stage that takes the model from state u to state v::

    states of a row     {} -- {a} -- {a,b} -- {a,b,c}          span (1, 3) holds b and c

    states of a graph   {} -- {a} --+-- {a,b} --+-- {a,b,c}    the downsets: one state for
                                    +-- {a,c} --+              every antichain

Entries of the (states x states) matrices that are no spans mean nothing. Which operators of a
value or parameter lie in a span follows from counts per state, so that each matrix is a product of
two thin ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from anabranch.cost import CostModel
from anabranch.graph.opgraph import BATCH

Matrix = NDArray[np.float64]
Bools = NDArray[np.bool_]


class Spans:
    """Weighs all spans.

    Args:
        cost: prices the operators.
        states: bit masks, ascending by size, from the empty set to all operators.
    """

    def __init__(self, cost: CostModel, states: Sequence[int]) -> None:
        self.cost = cost
        self.states = tuple(states)
        width = len(cost.graph)
        packed = b"".join(mask.to_bytes(-(-width // 8), "little") for mask in self.states)
        rows = np.frombuffer(packed, dtype=np.uint8).reshape(len(self.states), -1)
        self._done = np.unpackbits(rows, axis=1, bitorder="little")[:, :width].astype(np.float64)

    def __len__(self) -> int:
        return len(self.states)

    @cached_property
    def nested(self) -> Bools:
        """Whether (u, v) is a span: u lies inside v and is not the same."""
        outside = self._done @ (1 - self._done).T
        return np.asarray((outside == 0) & ~np.eye(len(self), dtype=bool))

    def seconds(self, samples: float) -> NDArray[np.float64]:
        """Forward and backward of everything done, per state."""
        forward, backward = self.cost.op_seconds(samples)
        return np.asarray(self._done @ (forward + backward))

    def least_work_s(self, samples: Sequence[int]) -> NDArray[np.float64]:
        """Seconds per sample of everything done, each operator at the best of these counts."""
        per_sample = [np.add(*self.cost.op_seconds(n)) / n for n in samples]
        return np.asarray(self._done @ np.min(per_sample, axis=0))

    def crossing_bytes(self, samples: float) -> NDArray[np.float64]:
        """Bytes that pass from what is done to what is not, and the gradients that come back."""
        there_and_back = 1 + self._grad
        nbytes = (self._per_sample * samples + self._fixed) * there_and_back
        return np.asarray(self._open @ nbytes)

    @cached_property
    def reduced_bytes(self) -> Matrix:
        """Trainable parameters of every span: what replicas all-reduce."""
        return self._parameters(trainable=True)

    def memory(self, samples: int) -> tuple[Matrix, Matrix]:
        """Bytes of every span whatever is in flight, and per micro-batch in flight."""
        entering = self._entering[0] * samples + self._entering[1]
        gradients = self._gradients[0] * samples + self._gradients[1]
        kept = self._done @ self.cost.kept_bytes * samples
        posted = self.cost.receive_slots * (entering + gradients)
        return self._state_bytes + posted, kept[None, :] - kept[:, None] + entering

    @cached_property
    def _state_bytes(self) -> Matrix:
        factor = 1 + self.cost.optimizer_factor
        return self._parameters(trainable=False) + self.reduced_bytes * factor

    @cached_property
    def _values(self) -> list[int]:
        values = self.cost.graph.values
        return [i for i, v in enumerate(values) if v.producer != BATCH and v.consumers]

    @cached_property
    def _per_sample(self) -> NDArray[np.float64]:
        values = self.cost.graph.values
        return np.array([values[i].nbytes * values[i].batched for i in self._values], dtype=float)

    @cached_property
    def _fixed(self) -> NDArray[np.float64]:
        values = self.cost.graph.values
        return np.array(
            [values[i].nbytes * (not values[i].batched) for i in self._values], dtype=float
        )

    @cached_property
    def _grad(self) -> NDArray[np.float64]:
        return np.array([self.cost.graph.values[i].grad for i in self._values], dtype=float)

    @cached_property
    def _made(self) -> Matrix:
        """Per state and value, whether it is made: 0 or 1."""
        return self._done[:, [self.cost.graph.values[i].producer for i in self._values]]

    @cached_property
    def _read(self) -> Matrix:
        """Per state and value, by how many operators it has been read."""
        return self._counts([self.cost.graph.values[i].consumers for i in self._values])

    @cached_property
    def _open(self) -> Matrix:
        """Per state and value, whether it is made and not all have read it: 0 or 1."""
        readers = [len(self.cost.graph.values[i].consumers) for i in self._values]
        return self._made * (self._read < np.array(readers, dtype=float))

    def _counts(self, readers: Sequence[Sequence[int]]) -> Matrix:
        reads = np.zeros((self._done.shape[1], len(readers)))
        for column, each in enumerate(readers):
            reads[list(each), column] = 1
        return self._done @ reads

    @cached_property
    def _entering(self) -> tuple[Matrix, Matrix]:
        """Bytes that a span reads from before it: per sample, fixed."""
        return (
            _touched(self._read, self._made * self._per_sample),
            _touched(self._read, self._made * self._fixed),
        )

    @cached_property
    def _gradients(self) -> tuple[Matrix, Matrix]:
        """Bytes of gradient that come back to a span from after it: per sample, fixed."""

        def of(nbytes: NDArray[np.float64]) -> Matrix:
            back = self._open * (nbytes * self._grad)
            return np.asarray(back.sum(axis=1)[None, :] - self._made @ back.T)

        return of(self._per_sample), of(self._fixed)

    def _parameters(self, *, trainable: bool) -> Matrix:
        readers: dict[str, list[int]] = {}
        for i, op in enumerate(self.cost.graph.ops):
            for name in dict.fromkeys(op.parameters):
                readers.setdefault(name, []).append(i)
        chosen = [name for name in readers if self.cost.parameters[name].trainable or not trainable]
        # What one operator alone reads adds up; only what several read needs a product.
        alone = np.zeros(self._done.shape[1])
        tied = []
        for name in chosen:
            if len(readers[name]) == 1:
                alone[readers[name][0]] += self.cost.parameters[name].nbytes
            else:
                tied.append(name)
        sums = self._done @ alone
        nbytes = np.array([self.cost.parameters[name].nbytes for name in tied], dtype=float)
        counts = self._counts([readers[name] for name in tied])
        return sums[None, :] - sums[:, None] + _touched(counts, np.ones_like(counts) * nbytes)


def _touched(counts: Matrix, nbytes: Matrix) -> Matrix:
    """Bytes of the things that count for more in v than in u: [u, v].

    Args:
        counts: per state and thing.
        nbytes: likewise, what it weighs for a span that begins there.
    """
    result = np.zeros((len(counts), len(counts)))
    most = counts[-1]
    for t in range(int(most.max(initial=0))):
        some = most > t
        begins = np.where(counts[:, some] == t, nbytes[:, some], 0.0)
        result += begins @ (counts[:, some] > t).T.astype(np.float64)
    return result
