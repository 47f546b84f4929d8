"""Prices of every run of operators at one micro-batch size, for every number of replicas.

Runs are [i, j) of the model in one order; arrays are [degree, i, j] or sums up to a cut.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from anabranch.cost.communication import transfer_s
from anabranch.cost.nested_sets import Floats, Ints, NestedSets
from anabranch.planner.toolkit.prices import MicrobatchPrices


class Runs(NamedTuple):
    """Seconds, bytes and headroom of every run of operators.

    Attributes:
        degrees: numbers of replicas, ascending.
        index_of: index in ``degrees`` of each number of replicas; -1 if it is not among them.
        forward_s: [degree, cut] seconds of the forwards of all operators before the cut.
        backward_s: [degree, cut] seconds of their backwards.
        work_s: [cut] device-seconds of all operators before the cut, whatever the replicas, at
            least.
        least_both_s, least_backward_s: [devices, cut] their seconds for one micro-batch, at least,
            on so many devices.
        headroom: [degree, i, j] the largest height at which the run fits; -1 for none.
        entering: [i, j] bytes of one micro-batch that the run reads from earlier operators.
        gradients: [i, j] bytes of gradients that it sends back to them.
        rings_s: [level, degree, i, j] seconds of the all-reduce of the run on devices that this
            level of the cluster connects.
    """

    degrees: Ints
    index_of: Ints
    forward_s: Floats
    backward_s: Floats
    work_s: Floats
    least_both_s: Floats
    least_backward_s: Floats
    headroom: Ints
    entering: Floats
    gradients: Floats
    rings_s: Floats
    num_microbatches: int


@dataclass(frozen=True)
class RunTables:
    """Prices of all runs at one micro-batch size.

    Attributes:
        row: the operators in the order of the pipeline.
        overlap_allreduce: price only the part of an all-reduce after the backward.
    """

    row: NestedSets
    prices: MicrobatchPrices
    overlap_allreduce: bool = False

    @property
    def least_s(self) -> float:
        """Lower bound of every L: all work distributed evenly."""
        devices = self.row.cost.cluster.num_devices
        return float(self.prices.num_microbatches * self.runs.work_s[-1] / devices)

    @cached_property
    def runs(self) -> Runs:
        cost, prices, footprint = self.row.cost, self.prices, self.row.matrices
        degrees = np.array(prices.degrees)
        devices = np.arange(cost.cluster.num_devices + 1)
        at = np.searchsorted(degrees, devices, side="right") - 1
        forward_s, backward_s = np.stack(
            [self.row.seconds(prices.samples(degree)) for degree in prices.degrees], axis=1
        )
        both_s = forward_s + backward_s

        def least(seconds: Floats) -> Floats:
            return _sums(np.minimum.accumulate(np.diff(seconds), axis=0))[np.maximum(at, 0)]

        return Runs(
            degrees,
            np.where(degrees[at] == devices, at, -1),
            forward_s,
            backward_s,
            _sums((np.diff(both_s) * degrees[:, None]).min(axis=0)),
            least(both_s),
            least(backward_s),
            prices.headroom(footprint, degrees[:, None, None]),
            footprint.border.entering.at(prices.microbatch_size),
            footprint.border.leaving_gradients.at(prices.microbatch_size),
            np.array(
                [
                    [
                        self._ring_s(level, *run)
                        for run in zip(prices.degrees, backward_s, strict=True)
                    ]
                    for level in range(len(cost.cluster.levels))
                ]
            ),
            prices.num_microbatches,
        )

    def _ring_s(self, level: int, degree: int, done: Floats) -> Floats:
        reduced, cost = self.row.matrices.held.summed, self.row.cost
        per_byte, latency_s = cost.least_all_reduce_price(degree, level)
        if not self.overlap_allreduce:
            return np.asarray(transfer_s(reduced, per_byte, latency_s))
        # Column j: the gradients of the operators before cut j, which are complete when the
        # backward of operator j - 1 is; what sticks out of a run is the largest so far.
        before_last = np.concatenate([[0.0], done[:-1]])
        late = reduced * per_byte - (before_last[None, :] - done[:, None])
        late[np.tril_indices(len(late))] = -np.inf
        return np.where(reduced > 0, np.maximum.accumulate(late, axis=1) + latency_s, 0.0)


def _sums(values: Floats) -> Floats:
    """Return cumulative sums up to every cut."""
    sums: Floats = np.insert(np.cumsum(values, axis=-1), 0, 0.0, axis=-1)
    return sums
