"""What every run of operators costs at one micro-batch size, for every number of replicas.

Runs are [i, j) of the model in one order; arrays are [degree, i, j] or sums up to a cut. Replicas
hold ``ceil(b / d)`` samples, the fullest one, or with ``even_slices`` exactly ``b / d``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from anabranch.cost import CostModel
from anabranch.planner.partitioner.rows import Row
from anabranch.planner.toolkit.prices import Prices
from anabranch.plans.slices import priced

Floats = NDArray[np.float64]
Ints = NDArray[np.int32]


@dataclass(frozen=True)
class Terms:
    """What is the same for every micro-batch size of one search.

    Attributes:
        cost: prices the operators on the cluster.
        batch_size: samples of one step.
        order: operators in the order of the pipeline.
        max_replicas: most devices of one stage.
        overlap_allreduce: count of an all-reduce only what sticks out of the backward.
        even_slices: replicas have exactly b / d samples.
        check_memory: refuse stages that do not fit a device.
    """

    cost: CostModel
    batch_size: int
    order: tuple[int, ...]
    max_replicas: int
    overlap_allreduce: bool = False
    even_slices: bool = False
    check_memory: bool = True

    @cached_property
    def row(self) -> Row:
        """Bytes of every run."""
        return Row(self.cost, [1 << op for op in self.order])

    def samples(self, microbatch_size: int, degree: int) -> float:
        """Samples on a replica."""
        if self.even_slices:
            return microbatch_size / degree
        return -(-microbatch_size // degree)

    def degrees(self, microbatch_size: int) -> tuple[int, ...]:
        """Numbers of replicas that a micro-batch can be split over, ascending."""
        limit = min(self.cost.cluster.num_devices, self.max_replicas)
        cost, size = self.cost, microbatch_size
        if self.even_slices:
            return tuple(d for d in range(1, limit + 1) if cost.covers(size / d))
        most = min(limit, size)
        return tuple(d for d in range(1, most + 1) if priced(cost, self.batch_size, size, d))


class Tables:
    """Seconds, bytes and room of every run of operators.

    Attributes:
        num_microbatches: M.
        degrees: numbers of replicas, ascending.
        index: per number of replicas its place in ``degrees``, -1 where it cannot be.
        forward_s: [degree, cut] seconds of all operators before the cut.
        backward_s: likewise.
        both_s: their sum.
        headroom: [degree, i, j] the largest height at which the run fits; -1 for none.
        entering: [i, j] bytes of one micro-batch that the run reads from before it.
        gradients: [i, j] bytes that it sends back.
        work_s: [cut] device-seconds of all operators before the cut, whatever the replicas, at
            least.
        least_both_s, least_backward_s: [devices, cut] their seconds for one micro-batch, at least,
            on so many devices.
    """

    def __init__(self, terms: Terms, microbatch_size: int) -> None:
        self.terms = terms
        self.microbatch_size = microbatch_size
        self.num_microbatches = -(-terms.batch_size // microbatch_size)
        self.degrees = terms.degrees(microbatch_size)
        self.index = np.full(terms.cost.cluster.num_devices + 1, -1)
        self.index[list(self.degrees)] = range(len(self.degrees))
        self._time()
        self.entering = terms.row.entering.at(microbatch_size)
        self.gradients = terms.row.leaving_gradients.at(microbatch_size)
        self.headroom = self._headroom()
        self._rings: dict[tuple[int, float], Floats] = {}

    @property
    def least_s(self) -> float:
        """A lower bound on every L: all work shared out evenly."""
        devices = self.terms.cost.cluster.num_devices
        return float(self.num_microbatches * self.work_s[-1] / devices)

    def _time(self) -> None:
        order = list(self.terms.order)
        forward, backward = [], []
        for degree in self.degrees:
            samples = self.terms.samples(self.microbatch_size, degree)
            there, back = self.terms.cost.op_seconds(samples)
            forward.append(_sums(there[order]))
            backward.append(_sums(back[order]))
        self.forward_s, self.backward_s = np.stack(forward), np.stack(backward)
        self.both_s = self.forward_s + self.backward_s
        each = np.diff(self.both_s)
        self.work_s = _sums((each * np.array(self.degrees)[:, None]).min(axis=0))
        self.least_both_s = self._least(self.both_s)
        self.least_backward_s = self._least(self.backward_s)

    def _least(self, seconds: Floats) -> Floats:
        least = np.minimum.accumulate(np.diff(seconds), axis=0)
        devices = np.arange(len(self.index))
        at = np.searchsorted(self.degrees, devices, side="right") - 1
        sums = np.concatenate([np.zeros((len(least), 1)), np.cumsum(least, axis=1)], axis=1)
        return sums[np.maximum(at, 0)]

    def _headroom(self) -> Ints:
        row, cost = self.terms.row, self.terms.cost
        result = np.empty((len(self.degrees), row.size + 1, row.size + 1), dtype=np.int32)
        memory = cost.cluster.memory_bytes if self.terms.check_memory else np.inf
        prices = Prices(
            cost, self.terms.batch_size, self.microbatch_size, self.degrees, float(memory)
        )
        for k, degree in enumerate(self.degrees):
            n = self.terms.samples(self.microbatch_size, degree)
            kept = row.kept_bytes() * n
            result[k] = prices.headroom(
                row.state_bytes() + cost.receive_slots * row.comes.at(n),
                kept[None, :] - kept[:, None] + row.entering.at(n),
            )
        return result

    def reduce_s(self, degree: int, per_byte: float, latency_s: float) -> Floats:
        """Seconds of the all-reduce of every run on a ring with this price, [i, j]."""
        key = degree, per_byte
        if key not in self._rings:
            self._rings[key] = self._ring(degree, per_byte, latency_s)
        return self._rings[key]

    def _ring(self, degree: int, per_byte: float, latency_s: float) -> Floats:
        reduced = self.terms.row.reduced_bytes
        ring = reduced * per_byte
        if self.terms.overlap_allreduce:
            # Column j: the gradients of the operators before cut j, which are complete when the
            # backward of operator j - 1 is; what sticks out of a run is the largest so far.
            done = self.backward_s[self.index[degree]]
            before_last = np.concatenate([[0.0], done[:-1]])
            late = ring - (before_last[None, :] - done[:, None])
            late[np.tril_indices(len(late))] = -np.inf
            ring = np.maximum.accumulate(late, axis=1)
        return np.where(reduced > 0, ring + latency_s, 0.0)


def _sums(values: Floats) -> Floats:
    return np.concatenate([[0.0], np.cumsum(values)])
