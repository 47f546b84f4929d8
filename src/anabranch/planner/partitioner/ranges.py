"""Periods and memory of every range of a row at once, for one micro-batch size.

Next to whole ranges, this prices what a range gains when a stage that begins or ends at the block
beside it also takes the last or first operators of a branch (``Shares``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from anabranch.planner.partitioner.prices import Bound, Prices
from anabranch.planner.partitioner.rows import Row

INFINITE = 1 << 28
"""More devices than there are."""

Floats = NDArray[np.float64]
Ints = NDArray[np.int32]
Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class Shares:
    """What a stage gains with the part of a branch on one side of every cut.

    Arrays are [k, c] for degree k and cut c.

    Attributes:
        compute_s: seconds of compute per micro-batch.
        traffic_s: seconds of transfers per micro-batch; may be negative, as what the stage now
            makes itself no longer enters it.
        reduce_s: seconds of all-reduce per step.
        fixed: bytes of memory whatever is in flight.
        per_microbatch: bytes of memory per micro-batch in flight.
    """

    compute_s: Floats
    traffic_s: Floats
    reduce_s: Floats
    fixed: Floats
    per_microbatch: Floats

    def memory(self, in_flight: Ints) -> Floats:
        """Bytes for several numbers in flight: [..., k, c]."""
        return self.fixed + in_flight[..., None, None] * self.per_microbatch

    def take(self, cuts: Sequence[int]) -> Shares:
        """Only these cuts, in this order."""
        chosen = list(cuts)
        return Shares(*(getattr(self, each.name)[:, chosen] for each in fields(self)))


class Ranges:
    """One row at one micro-batch size; arrays are [degree, start, stop].

    Attributes:
        compute_s: seconds of compute per micro-batch.
        traffic_s: seconds of transfers per micro-batch.
        reduce_s: seconds of all-reduce per step.
        fixed: bytes of memory whatever is in flight.
        per_microbatch: bytes of memory per micro-batch in flight.
        headroom: the largest height at which the range fits.
    """

    def __init__(self, row: Row, prices: Prices) -> None:
        self.row = row
        self.prices = prices
        shape = (len(prices.degrees), row.size + 1, row.size + 1)
        self.compute_s = np.empty(shape)
        self.traffic_s = np.empty(shape)
        self.reduce_s = np.empty(shape)
        self.fixed = np.empty(shape)
        self.per_microbatch = np.empty(shape)
        for k, degree in enumerate(prices.degrees):
            self._price(k, degree)
        self.headroom = prices.headroom(self.fixed, self.per_microbatch)
        empty = np.tril(np.ones(shape[1:], dtype=bool))
        self.headroom[:, empty] = -1
        self._slowest_s = np.maximum(self.compute_s, self.traffic_s)
        self._spread_s = self._slowest_s + self.reduce_s / prices.num_microbatches

    def _price(self, k: int, degree: int) -> None:
        row, prices = self.row, self.prices
        n = prices.samples(degree)
        compute, kept = row.compute_s(n), row.kept_bytes * n
        comes = row.comes.at(n)
        np.subtract(compute[None, :], compute[:, None], out=self.compute_s[k])
        np.multiply(np.maximum(comes, row.goes.at(n)), prices.share(degree), out=self.traffic_s[k])
        self.reduce_s[k] = prices.allreduce_s(row.reduced_bytes, degree)
        np.add(row.state_bytes, prices.cost.receive_slots * comes, out=self.fixed[k])
        np.add(kept[None, :] - kept[:, None], row.entering.at(n), out=self.per_microbatch[k])

    def need(self, bound: Bound, heights: int) -> Ints:
        """Fewest devices for every range within a bound: [height, stop, start].

        ``INFINITE`` where no degree does. Where memory never depends on the height, the first axis
        has length 1.
        """
        within = (self._spread_s if bound.spread else self._slowest_s) <= bound.period_s
        if bound.reduce_s < np.inf:
            within &= self.reduce_s <= bound.reduce_s
        fits = np.where(within, self.headroom, -1).transpose(0, 2, 1)
        shape = fits.shape[1:]
        fits = fits.reshape(len(fits), -1)
        degrees = np.array(self.prices.degrees, dtype=np.int32)
        always = np.full(fits.shape[1], INFINITE, dtype=np.int32)
        for k in reversed(range(len(fits))):
            always[fits[k] >= heights - 1] = degrees[k]
        graded, at = np.nonzero((fits >= 0) & (fits < heights - 1))
        if not len(at):
            return always.reshape(1, *shape)
        # From the greatest height down ever more fits, and is put in at its height.
        level, degree = fits[graded, at], degrees[graded]
        order = np.lexsort((-degree, -level))
        level, at, degree = level[order], at[order], degree[order]
        ends = np.searchsorted(-level, -np.arange(heights), side="right")
        result = np.empty((heights, fits.shape[1]), dtype=np.int32)
        result[-1] = always
        for h in reversed(range(heights - 1)):
            result[h] = result[h + 1]
            some = slice(ends[h + 1], ends[h])
            # Of two degrees at one place the smaller comes last, and stays.
            result[h, at[some]] = np.minimum(result[h, at[some]], degree[some])
        return result.reshape(heights, *shape)

    @cached_property
    def tails(self) -> Shares:
        """For a stage after this row's end that also takes the parts from cut c on."""
        row, end = self.row, self.row.size

        def gains(n: int) -> tuple[Floats, Floats, Floats]:
            # What the tail sends on no longer enters the stage; what the tail reads does.
            enter = row.entering.at(n)[:, end] - row.leaving.at(n)[:, end]
            leave = row.leaving_gradients.at(n)[:, end] - row.entering_gradients.at(n)[:, end]
            return enter, leave, enter

        return self._shares(slice(None), end, gains)

    @cached_property
    def heads(self) -> Shares:
        """For a stage before this row's start that also takes the parts up to cut c."""
        row = self.row

        def gains(n: int) -> tuple[Floats, Floats, Floats]:
            # What only the head reads no longer leaves the stage; what the head makes does.
            enter = row.entering_gradients.at(n)[0] - row.sole_gradients.at(n)
            leave = row.leaving.at(n)[0] - row.sole_reads.at(n)
            return enter, leave, np.zeros_like(enter)

        return self._shares(0, slice(None), gains)

    def _shares(
        self,
        start: int | slice,
        stop: int | slice,
        gains: Callable[[int], tuple[Floats, Floats, Floats]],
    ) -> Shares:
        row, prices = self.row, self.prices
        kept = row.kept_bytes[stop] - row.kept_bytes[start]
        columns = []
        for degree in prices.degrees:
            n = prices.samples(degree)
            compute = row.compute_s(n)
            reduced = row.reduced_bytes[start, stop]
            enter, leave, held = gains(n)
            columns.append(
                (
                    compute[stop] - compute[start],
                    np.maximum(enter, leave) * prices.share(degree),
                    prices.allreduce_s(reduced, degree, latency=False),
                    row.state_bytes[start, stop] + prices.cost.receive_slots * enter,
                    kept * n + held,
                )
            )
        return Shares(*(np.stack(column) for column in zip(*columns, strict=True)))
