"""Memory of a device of a stage.

    n        samples on the fullest replica: micro-batch size / replicas, rounded up
    fixed    parameters + trainable * (versions + optimizer factor)
               of the optimizer factor, where replicas share its state, the part of one of them
             + entering + gradients of what leaves      received ahead
             - tables + rows / replicas     where gradients of tables are the rows of a batch
             + a pass                       besides what is kept (``StagePasses``)
             + kept * n + kept fixed        with recomputation: the inside of one micro-batch
    flight   entering + kept * n            without; with recomputation only what entered
             + kept fixed                   whatever the samples, such as casts of weights
    sums     terms of other replicas in a bucket of gradients, when nothing is in flight any more:
             what has been added up on the way to its own, and the next one; on the first two
             replicas, whose own are among the first terms, one. Of rows those of all replicas, and
             what they add up to
    update   temporaries of the optimizer, when nothing is in flight and all is summed: a share of
             what is updated, and of its largest parameter, as measured with the profile
    peak     fixed + in flight * flight     or, if that is more, with the sums or the update instead
             of a backward; where that is split, see ``simulator.stage_costs.FlightBytes``

The versions of the trainable weights include the current one, whose place on top is taken by the
gradients, which lie in the buckets of their all-reduce. What enters is held until the backward;
a receive of each kind is posted ahead. Without a measurement the optimizer is taken to update in
place, as the fused ones do; others need some more (``torch.optim`` with ``foreach``: as much as the
trainable parameters), mostly less than what is in flight before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from anabranch.cost.buckets import BUCKET_BYTES
from anabranch.cost.stage_weights import Number

MOST_TERMS = 2
"""Terms of other replicas that are at hand while a bucket is summed, on the fullest one."""


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes on a device of a stage; numbers, or arrays with an entry per stage.

    Attributes:
        resident: whatever is in flight.
        flight: of each micro-batch between its forward and its backward.
        backward: on top during a backward.
        sums: on top while gradients are summed, or in the update if that takes more, with nothing
            in flight.
    """

    resident: Number
    flight: Number
    backward: Number
    sums: Number = 0.0

    @property
    def fixed(self) -> Number:
        """Bytes in a backward that do not depend on the micro-batches in flight."""
        return self.resident + self.backward

    @property
    def at_the_end(self) -> Number:
        """Bytes while gradients are summed."""
        return self.resident + self.sums

    def peak(self, in_flight: Number) -> Number:
        """Most bytes with so many micro-batches in flight."""
        return np.maximum(self.fixed + in_flight * self.flight, self.at_the_end)

    def most_in_flight(self, capacity: Number, num_microbatches: Number) -> Number:
        """Micro-batches that fit into so many bytes: 0 if none, ``num_microbatches`` at most."""
        free = capacity - self.fixed
        # Where a micro-batch takes nothing, all of them fit or none.
        share = free / np.where(self.flight > 0, self.flight, 1.0)
        count = np.where(self.flight > 0, share, (free >= 0) * num_microbatches)
        count = np.where(self.at_the_end <= capacity, count, 0)
        return np.minimum(np.maximum(count, 0), num_microbatches).astype(np.int32)


def memory_terms(
    parameters: Number,
    trainable: Number,
    updated: Number,
    largest_gradient: Number,
    entering: Number,
    returning: Number,
    kept: Number,
    passing: Number,
    recompute: Number,
    replicas: Number,
    terms: Number,
    versions: Number,
    optimizer_factor: float,
    tables: Number = 0.0,
    rows: Number = 0.0,
    all_temporary: float = 0.0,
    largest_temporary: float = 0.0,
) -> tuple[Number, Number, Number, Number]:
    """The fields of ``DeviceMemory``, of plain numbers; planners also compile it.

    Args:
        updated: trainable bytes that a replica updates.
        largest_gradient: bytes of the largest gradient of one parameter.
        entering: bytes of a micro-batch, and so is what is ``returning`` and ``kept``.
        passing: bytes of a pass besides.
        terms: of other replicas that are at hand while a bucket is summed; 0 for a single replica.
        all_temporary: see ``UpdateCost``, and so for ``largest_temporary``.
    """
    state = parameters + trainable * versions + updated * optimizer_factor
    inside = kept * recompute
    dense = np.maximum(updated - tables, 0.0)
    bucket = np.minimum(updated, np.maximum(largest_gradient, np.minimum(dense, BUCKET_BYTES)))
    return (
        state - tables + rows / replicas + entering + returning,
        entering + (kept - inside),
        inside + passing,
        np.maximum(
            # Rows of all replicas as they came, and their sums.
            np.maximum(bucket * terms, rows * 2 * (terms > 0)),
            (dense + rows / replicas) * all_temporary
            + np.minimum(updated, largest_gradient) * largest_temporary,
        ),
    )


def deal(nbytes: Sequence[int], replicas: int, *, cut: bool = True) -> list[list[tuple[int, int]]]:
    """The replicas that update each parameter where they share the optimizer's state, and how many
    of its bytes, from its first rows to its last: the largest parameters first, each to the replica
    that has fewest bytes (Graham 1969, LPT), the small ones to that with fewest parameters. One
    that does not fit into the equal part of a replica is cut (McNaughton 1959).

    Args:
        nbytes: of the parameters, in one order on all ranks.
        cut: whether the optimizer updates each element by itself, so that parts will do.
    """
    held, left = np.zeros((2, replicas)), sum(nbytes)
    dealt: list[list[tuple[int, int]]] = [[] for _ in nbytes]
    part, small = -(-left // replicas), _DEALING.small * left / replicas
    for i in sorted(range(len(nbytes)), key=nbytes.__getitem__, reverse=True):
        to_come, is_small = nbytes[i], left <= small
        left -= to_come
        while to_come or not dealt[i]:
            replica = int(held[int(is_small)].argmin())
            room = part - int(held[0, replica])
            fits = not cut or is_small or to_come <= room + _DEALING.above * part
            piece = to_come if fits else room
            dealt[i].append((replica, piece))
            held[:, replica] += piece, 1
            to_come -= piece
    return dealt


@dataclass(frozen=True, slots=True)
class Dealing:
    """Tuned numbers of how parameters are dealt to replicas that share the optimizer's state.

    Attributes:
        small: share of a replica's part that the smallest parameters have together, mostly
            biases, of which all replicas update as many: each takes some microseconds,
            whatever its size. Without, one of two has 110 of the 143 parameters of
            ``glyphs`` (small), with it 72, and 1 % more bytes than half.
        above: share of its equal part that a replica may have above it before a parameter
            is cut: a piece is a message more, and a parameter that is cut another one. Of
            the built-in models (small) on 2, 4, 8 and 16 replicas .05 cuts something in 17
            cases of 32, .1 in 12; the fullest has up to 1.06 and 1.11 parts.
    """

    small: float = 0.02
    above: float = 0.1


_DEALING = Dealing()
