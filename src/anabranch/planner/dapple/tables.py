"""Prices of every run of operators at one micro-batch size, for every number of replicas.

Runs are [i, j) of the model in one order; arrays are [degree, i, j] or sums up to a cut.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from anabranch.cost.communication import ring_price, transfer_s
from anabranch.cost.nested_weights import Floats, NestedSets
from anabranch.planner.toolkit.prices import MicrobatchPrices


class Tables:
    """Seconds, bytes and room of every run of operators.

    Args:
        overlap_allreduce: count of an all-reduce only what sticks out of the backward.

    Attributes:
        row: the operators in the order of the pipeline.
        num_microbatches: M.
        degrees: numbers of replicas, ascending.
        index: per number of replicas its place in ``degrees``, -1 where it cannot be.
        forward_s: [degree, cut] seconds of all operators before the cut.
        backward_s: likewise.
        headroom: [degree, i, j] the largest height at which the run fits; -1 for none.
        entering: [i, j] bytes of one micro-batch that the run reads from before it.
        gradients: [i, j] bytes that it sends back.
        work_s: [cut] device-seconds of all operators before the cut, whatever the replicas, at
            least.
        least_both_s, least_backward_s: [devices, cut] their seconds for one micro-batch, at least,
            on so many devices.
    """

    def __init__(
        self, row: NestedSets, prices: MicrobatchPrices, *, overlap_allreduce: bool = False
    ) -> None:
        self.row = row
        self.prices = prices
        self.num_microbatches = prices.num_microbatches
        self.degrees = prices.degrees
        self._overlap_allreduce = overlap_allreduce
        self.index = np.full(row.cost.cluster.num_devices + 1, -1)
        self.index[list(self.degrees)] = range(len(self.degrees))
        self._time()
        weights = row.matrices()
        self.entering = weights.border.entering.at(prices.microbatch_size)
        self.gradients = weights.border.leaving_gradients.at(prices.microbatch_size)
        self.headroom = prices.headroom(weights, np.array(self.degrees)[:, None, None])

    @property
    def least_s(self) -> float:
        """A lower bound on every L: all work shared out evenly."""
        devices = self.row.cost.cluster.num_devices
        return float(self.num_microbatches * self.work_s[-1] / devices)

    def _time(self) -> None:
        seconds = [self.row.seconds(self.prices.samples(degree)) for degree in self.degrees]
        self.forward_s = np.stack([forward for forward, _ in seconds])
        self.backward_s = np.stack([backward for _, backward in seconds])
        both_s = self.forward_s + self.backward_s
        device_s = np.diff(both_s) * np.array(self.degrees)[:, None]
        self.work_s = _sums(device_s.min(axis=0))
        self.least_both_s = self._least(both_s)
        self.least_backward_s = self._least(self.backward_s)

    def _least(self, seconds: Floats) -> Floats:
        least = np.minimum.accumulate(np.diff(seconds), axis=0)
        devices = np.arange(len(self.index))
        at = np.searchsorted(self.degrees, devices, side="right") - 1
        sums = np.concatenate([np.zeros((len(least), 1)), np.cumsum(least, axis=1)], axis=1)
        return sums[np.maximum(at, 0)]

    @cached_property
    def rings_s(self) -> Floats:
        """[level, degree, i, j] seconds of the all-reduce of the run on devices that this level of
        the cluster connects.
        """
        cost = self.row.cost
        links = [cost.cluster.level_link(i) for i in range(len(cost.cluster.levels))]
        return np.array(
            [
                [
                    self._ring_s(
                        k, *ring_price(link.bandwidth, link.latency_s, degree, cost.updates)
                    )
                    for k, degree in enumerate(self.degrees)
                ]
                for link in links
            ]
        )

    def _ring_s(self, k: int, per_byte: float, latency_s: float) -> Floats:
        reduced = self.row.matrices().summed
        if not self._overlap_allreduce:
            return np.asarray(transfer_s(reduced, per_byte, latency_s))
        # Column j: the gradients of the operators before cut j, which are complete when the
        # backward of operator j - 1 is; what sticks out of a run is the largest so far.
        done = self.backward_s[k]
        before_last = np.concatenate([[0.0], done[:-1]])
        late = reduced * per_byte - (before_last[None, :] - done[:, None])
        late[np.tril_indices(len(late))] = -np.inf
        return np.where(reduced > 0, np.maximum.accumulate(late, axis=1) + latency_s, 0.0)


def _sums(values: Floats) -> Floats:
    return np.concatenate([[0.0], np.cumsum(values)])
