"""Memory of a device of a stage.

    n        samples on the fullest replica: micro-batch size / replicas, rounded up
    fixed    parameters + trainable * (versions + optimizer factor)
               the optimizer factor of one replica's part, where replicas share its state
             + entering + gradients of leaving values   received ahead
             - tables + rows / replicas     where gradients of tables are the rows of a batch
             + a pass                       besides kept bytes (``StagePasses``)
             + kept * n + kept fixed        with recomputation: the inside of one micro-batch
    flight   entering + kept * n            without recomputation; with it only ``entering``
             + kept fixed                   whatever the samples, such as casts of weights
    sums     terms of other replicas while a bucket of gradients is summed, with nothing in flight:
             the sum so far, and the next term; one of these on the first two replicas, whose own
             gradients are among the first terms. Of gradients by rows: the rows of all replicas,
             and their sums
    update   temporaries of the optimizer, with nothing in flight and all gradients summed: a share
             of the updated bytes, and one of the largest parameter, as measured with the profile
    peak     fixed + in flight * flight     or resident + sums, or resident + update, if that is
             more; for split backwards see ``simulator.stage_costs.FlightBytes``

The versions of the trainable weights include the current one. Parameters count it already, so its
place in the sum stands for the gradients, which lie in the buckets of their all-reduce. Entering
values are held until the backward; a receive of each kind is posted ahead. Without a measurement
the optimizer is taken to update in place, as fused ones do; others need some more (``torch.optim``
with ``foreach``: as much as the trainable parameters), mostly less than was in flight before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from anabranch.cost.buckets import BUCKET_BYTES
from anabranch.cost.footprint import Number

MOST_TERMS = 2
"""Terms of other replicas in memory while a bucket is summed, on the fullest replica."""


class StageBytes(NamedTuple):
    """Bytes of a stage from which the memory of its devices follows; numbers, or arrays with an
    entry per stage. See ``ParameterBytes`` for the first four.

    Attributes:
        updated: trainable bytes that a replica updates.
        largest_gradient: bytes of the largest gradient of one parameter.
        entering: values of a micro-batch that a replica reads from other stages.
        returning: gradients of the values of a micro-batch that it sends to other stages.
        kept: values of a micro-batch that it keeps for the backward.
        passing: bytes of a pass besides.
    """

    parameters: Number
    trainable: Number
    tables: Number
    rows: Number
    updated: Number
    largest_gradient: Number
    entering: Number
    returning: Number
    kept: Number
    passing: Number


class OptimizerBytes(NamedTuple):
    """Bytes of an optimizer.

    Attributes:
        factor: state, in multiples of the updated bytes.
        all_temporary: see ``UpdateCost``, as for ``largest_temporary``.
    """

    factor: float
    all_temporary: float
    largest_temporary: float


class DeviceMemory(NamedTuple):
    """Bytes on a device of a stage; numbers, or arrays with an entry per stage.

    Attributes:
        resident: bytes that are there whatever is in flight.
        flight: bytes of each micro-batch between its forward and its backward.
        backward: bytes on top during a backward.
        sums: bytes on top of ``resident``, with nothing in flight, while gradients are summed, or
            in the update if that takes more.
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
        """Bytes while gradients are summed or updated."""
        return self.resident + self.sums

    def peak(self, in_flight: Number) -> Number:
        """Return the most bytes with a number of micro-batches in flight."""
        return np.maximum(self.fixed + in_flight * self.flight, self.at_the_end)

    def most_in_flight(self, capacity: Number, num_microbatches: Number) -> Number:
        """Return how many of ``num_microbatches`` fit into ``capacity`` bytes."""
        free = capacity - self.fixed
        # Where a micro-batch takes no memory, all micro-batches fit or none.
        share = free / np.where(self.flight > 0, self.flight, 1.0)
        count = np.where(self.flight > 0, share, (free >= 0) * num_microbatches)
        count = np.where(self.at_the_end <= capacity, count, 0)
        return np.minimum(np.maximum(count, 0), num_microbatches).astype(np.int32)


def device_memory(
    stage: StageBytes,
    optimizer: OptimizerBytes,
    recompute: Number,
    replicas: Number,
    terms: Number,
    versions: Number,
) -> DeviceMemory:
    """Return the memory of a device of a stage; the search compiles it, with plain numbers.

    Args:
        terms: terms of other replicas in memory while a bucket is summed; 0 for a single replica.
        versions: versions of the trainable weights, the current one among them.
    """
    state = stage.parameters + stage.trainable * versions + stage.updated * optimizer.factor
    inside = stage.kept * recompute
    dense = np.maximum(stage.updated - stage.tables, 0.0)
    largest = np.minimum(stage.updated, stage.largest_gradient)
    bucket = np.minimum(
        stage.updated, np.maximum(stage.largest_gradient, np.minimum(dense, BUCKET_BYTES))
    )
    # Rows as they came from all replicas, and their sums.
    summing = np.maximum(bucket * terms, stage.rows * 2 * (terms > 0))
    own_rows = stage.rows / replicas
    updating = (dense + own_rows) * optimizer.all_temporary + largest * optimizer.largest_temporary
    return DeviceMemory(
        resident=state - stage.tables + own_rows + stage.entering + stage.returning,
        flight=stage.entering + (stage.kept - inside),
        backward=inside + stage.passing,
        sums=np.maximum(summing, updating),
    )


def deal(nbytes: Sequence[int], replicas: int, *, cut: bool = True) -> list[list[tuple[int, int]]]:
    """Deal parameters to replicas that share the optimizer's state.

    The largest come first, each to the replica that has fewest bytes (Graham 1969, LPT), small ones
    to that with fewest parameters. A parameter that does not fit into the equal part of a replica
    is cut (McNaughton 1959).

    Args:
        nbytes: bytes of each parameter, in the same order on all ranks.
        cut: whether the optimizer updates each element by itself, so that parameters may be cut.

    Returns:
        Per parameter, (replica, bytes that it updates), from the first rows to the last.
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
        small: the smallest parameters, mostly biases, that together have this share of an equal
            part are dealt by number, because each takes some microseconds whatever its size.
            Otherwise one of two replicas has 110 of the 143 parameters of ``glyphs`` (small); so
            it has 72, and 1 % more bytes than half.
        above: share of its equal part by which a replica may exceed it before a parameter is cut:
            each piece is a message more. Of the built-in models (small) on 2, 4, 8 and 16 replicas
            .05 cuts something in 17 cases of 32, .1 in 12; the fullest replica has up to 1.06 and
            1.11 parts.
    """

    small: float = 0.02
    above: float = 0.1


_DEALING = Dealing()
