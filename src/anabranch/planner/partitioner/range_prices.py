"""Prices of every range of a row at once, for several micro-batch sizes and all modes.

``Shares`` prices what a range gains when a stage beside it also takes a part of a branch.
Arrays are [size s, mode k, ...] or, where they depend on bounds, [bound t, ...].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anabranch.cost.communication import all_reduce_s
from anabranch.cost.memory import DeviceMemory
from anabranch.cost.nested_weights import NestedSets
from anabranch.cost.period import period_s, traffic_s, work_s
from anabranch.cost.stage_weights import Border, StageWeights, Traffic
from anabranch.planner.toolkit.prices import Bound, MicrobatchPrices, Mode

INFINITE = 1 << 28
"""More devices than there are."""

Floats = NDArray[np.float64]
Ints = NDArray[np.int32]
Bools = NDArray[np.bool_]
Places = Any
"""What picks entries of a matrix [start, stop]: slices or arrays of places."""


class RangeSizes:
    """Micro-batch sizes that are searched together, and the modes of all of them.

    Attributes:
        modes: those of any size, fewest devices first; of equals the plainest first.
        devices: of each mode: [k].
        valid: whether a size may use a mode: [s, k].
        samples: on the fullest replica, 0 where not valid: [s, k].
        count: micro-batches: [s].
        share: seconds per byte that crosses a border: [k].
    """

    def __init__(self, prices: Sequence[MicrobatchPrices]) -> None:
        self.prices = tuple(prices)
        self.modes = tuple(
            sorted(
                {mode for size in prices for mode in size.modes},
                key=lambda mode: (mode.devices, mode.recompute, mode.tensor),
            )
        )
        first = self.prices[0]
        self.cost = first.cost
        self.devices = np.array([mode.devices for mode in self.modes], dtype=np.int32)
        self.valid: Bools = np.array([[m in size.modes for m in self.modes] for size in prices])
        samples = [[size.samples(mode.replicas) for mode in self.modes] for size in prices]
        self.samples: Floats = np.where(self.valid, np.array(samples, dtype=np.float64), 0.0)
        self.count: Floats = np.array([size.num_microbatches for size in prices], dtype=np.float64)
        self.microbatch_size = np.array([size.microbatch_size for size in prices])
        self.replicas = np.array([mode.replicas for mode in self.modes])
        self.share: Floats = np.array([self.cost.border_price(mode.devices) for mode in self.modes])
        self.memory_bytes = float(first.memory_bytes)
        self.recompute: Bools = np.array([mode.recompute for mode in self.modes])
        rings = [first.ring(mode.replicas, mode.tensor) for mode in self.modes]
        self.ring_per_byte: Floats = np.array([per_byte for per_byte, _ in rings])
        self.ring_latency_s: Floats = np.array([latency_s for _, latency_s in rings])
        tensors = sorted({mode.tensor for mode in self.modes})
        self.tensors = tuple(tensors)
        self.tensor: NDArray[np.intp] = np.array([tensors.index(m.tensor) for m in self.modes])

    def __len__(self) -> int:
        return len(self.prices)

    @cached_property
    def by_devices(self) -> dict[int, list[int]]:
        """Places of the modes with so many devices."""
        result: dict[int, list[int]] = {}
        for k, mode in enumerate(self.modes):
            result.setdefault(mode.devices, []).append(k)
        return result


@dataclass(frozen=True)
class Shares:
    """What a stage gains with the part of a branch on one side of every cut.

    Arrays are [s, k, c] for cut c, or [k, c].

    Attributes:
        traffic_s: seconds of transfers per micro-batch; may be negative, as what the stage now
            makes itself no longer enters it.
    """

    compute_s: Floats
    traffic_s: Floats
    reduce_s: Floats
    fixed: Floats
    per_microbatch: Floats

    def take(self, cuts: Sequence[int]) -> Shares:
        """Only these cuts, in this order."""
        chosen = list(cuts)
        return Shares(
            self.compute_s[..., chosen],
            self.traffic_s[..., chosen],
            self.reduce_s[..., chosen],
            self.fixed[..., chosen],
            self.per_microbatch[..., chosen],
        )


class RangePrices:
    """One row at several micro-batch sizes; tables are [s, k, p] for the p-th range not empty."""

    def __init__(self, row: NestedSets, sizes: RangeSizes) -> None:
        self.row = row
        self.sizes = sizes
        # Row after row of the upper triangle.
        self._all: tuple[NDArray[np.intp], NDArray[np.intp]] = np.triu_indices(len(row), 1)
        self._compute_s = self.compute_s(self._all)
        self._slowest_s = work_s(self._compute_s, self.traffic_s(self._all))
        # A size that may not use a mode never has it within a bound.
        self._slowest_s[~sizes.valid] = np.inf

    def _place(self, start: int, stop: int) -> int:
        return start * len(self.row.parts) - start * (start - 1) // 2 + stop - start - 1

    @cached_property
    def _running(self) -> Floats:
        """Seconds of the first j parts: [s, k, j]."""
        sizes = self.sizes
        result = np.zeros((len(sizes), len(sizes.modes), len(self.row)))
        for s in range(len(sizes)):
            for k, mode in enumerate(sizes.modes):
                if sizes.valid[s, k]:
                    result[s, k] = self.row.compute_s(
                        sizes.samples[s, k], mode.tensor, recompute=mode.recompute
                    )
        return result

    def _weights(self, at: Places) -> StageWeights:
        """Bytes of some ranges (start, stop): parameters and what is kept by mode, [k, ...]."""
        per_tensor = [self.row.matrices(tensor) for tensor in self.sizes.tensors]

        def by_mode(matrices: Sequence[Floats]) -> Floats:
            return np.asarray(np.stack([matrix[at] for matrix in matrices])[self.sizes.tensor])

        return StageWeights(
            by_mode([weights.parameters for weights in per_tensor]),
            by_mode([weights.trainable for weights in per_tensor]),
            by_mode([weights.kept for weights in per_tensor]),
            per_tensor[0].border[at],
            by_mode([weights.largest for weights in per_tensor]),
        )

    def compute_s(self, at: Places) -> Floats:
        """Seconds of compute per micro-batch of some ranges (start, stop): [s, k, ...]."""
        start, stop = at
        return np.asarray(self._running[..., stop] - self._running[..., start])

    def traffic_s(self, at: Places) -> Floats:
        """Seconds of transfers per micro-batch of some ranges (start, stop): [s, k, ...]."""
        border, samples = self.row.matrices().border, self.sizes.samples
        comes, goes = border.comes[at], border.goes[at]
        wide = (1,) * comes.per_sample.ndim
        samples, price = samples.reshape(*samples.shape, *wide), self.sizes.share.reshape(-1, *wide)
        return np.asarray(traffic_s(comes, goes, samples, price))

    def reduce_s(self, at: Places) -> Floats:
        """Seconds of all-reduce per step of some ranges (start, stop): [k, ...]."""
        nbytes = self._weights(at).trainable
        wide = (-1, *(1,) * (nbytes.ndim - 1))
        per_byte, latency = self.sizes.ring_per_byte, self.sizes.ring_latency_s
        return np.asarray(all_reduce_s(nbytes, per_byte.reshape(wide), latency.reshape(wide)))

    def memory(self, at: Places) -> DeviceMemory:
        """Bytes of some ranges (start, stop): [s, k, ...]."""
        return self._memory(self._weights(at))

    def _memory(self, weights: StageWeights) -> DeviceMemory:
        sizes, wide = self.sizes, (1,) * (weights.kept.ndim - 1)
        return sizes.cost.memory(
            weights,
            sizes.microbatch_size.reshape(-1, 1, *wide),
            sizes.replicas.reshape(-1, *wide),
            recompute=sizes.recompute.reshape(-1, *wide),
        )

    @cached_property
    def headroom(self) -> Ints:
        """The largest height at which a range fits, -1 for none: [s, k, p]."""
        count = self.sizes.count[:, None, None]
        held = self.memory(self._all).most_in_flight(self.sizes.memory_bytes, count)
        # More than all micro-batches are never in flight.
        return np.where(held == count, INFINITE, held - 1).astype(np.int32)

    @cached_property
    def _reduce_s(self) -> Floats:
        return self.reduce_s(self._all)

    @cached_property
    def spread_s(self) -> Floats:
        """Periods, the all-reduce spread over the micro-batches: [s, k, p]."""
        count = self.sizes.count[:, None, None]
        return np.asarray(period_s(self._slowest_s, self._compute_s, self._reduce_s, count))

    @cached_property
    def _at_sink(self) -> dict[bool, Floats]:
        """Spread or not -> periods, infinite where a range fits at no height."""
        none = self.headroom < 0
        return {
            spread: np.where(none, np.inf, seconds)
            for spread, seconds in ((False, self._slowest_s), (True, self.spread_s))
        }

    def mode(self, bound: Bound, start: int, stop: int, height: int, devices: int) -> Mode:
        """The quickest mode with so many devices in which a range is within a bound and fits."""
        alike = self.sizes.by_devices[devices]
        if len(alike) == 1:
            return self.sizes.modes[alike[0]]
        p = self._place(start, stop)
        seconds = self.spread_s if bound.spread else self._slowest_s
        at = self.sizes.devices == devices
        at &= self.headroom[bound.at, :, p] >= height
        at &= seconds[bound.at, :, p] <= bound.period_s
        if bound.reduce_s < np.inf:
            at &= self._reduce_s[:, p] <= bound.reduce_s
        places = np.flatnonzero(at)
        quickest = self._slowest_s[bound.at, places, p].argmin()
        return self.sizes.modes[int(places[quickest])]

    def need(self, bounds: Sequence[Bound], heights: int, most: int | None = None) -> Ints:
        """Fewest devices for every range within bounds: [bound, height, stop, start].

        ``INFINITE`` where no mode does; one height where memory does not depend on it. Bounds are
        all spread, or none. The last height stands for ``most``, by default for itself.
        """
        most = heights - 1 if most is None else most
        bound_sizes = [bound.at for bound in bounds]
        # [t, p], and what fits at some heights only as (level, place in [t, p], devices).
        always = np.full((len(bounds), len(self._all[0])), INFINITE, dtype=np.int32)
        graded = []
        for k in reversed(range(len(self.sizes.modes))):
            within = self._within(bounds, k)
            if most:
                headroom = self.headroom[bound_sizes, k]
                places = np.flatnonzero(within & (headroom < most))
                if len(places):
                    level = np.minimum(headroom.reshape(-1)[places], heights - 2)
                    graded.append((level, places, self.sizes.devices[k]))
                within &= headroom >= most
            np.copyto(always, self.sizes.devices[k], where=within)
        table = self._graded(always, graded, heights) if graded else always[:, None]
        size = len(self.row)
        start, stop = self._all
        result = np.full((*table.shape[:2], size, size), INFINITE, dtype=np.int32)
        result[:, :, stop, start] = table
        return result

    def _within(self, bounds: Sequence[Bound], k: int) -> Bools:
        """Whether ranges in one mode are within bounds and fit at height 0: [t, p]."""
        bound_sizes = [bound.at for bound in bounds]
        seconds = self._at_sink[bounds[0].spread][bound_sizes, k]
        within: Bools = seconds <= np.array([bound.period_s for bound in bounds])[:, None]
        if any(bound.reduce_s < np.inf for bound in bounds):
            longest = np.array([bound.reduce_s for bound in bounds])[:, None]
            within &= self._reduce_s[k] <= longest
        return within & (seconds < np.inf)

    @staticmethod
    def _graded(
        always: Ints, graded: Sequence[tuple[Ints, NDArray[np.intp], np.int32]], heights: int
    ) -> Ints:
        """From the greatest height down ever more fits, and is put in at its height: [t, h, p]."""
        level = np.concatenate([levels for levels, _, _ in graded])
        place = np.concatenate([places for _, places, _ in graded])
        devices = np.concatenate([np.full(len(places), count) for _, places, count in graded])
        order = np.argsort(-level, kind="stable")
        level, devices = level[order], devices[order]
        bound, p = np.divmod(place[order], always.shape[1])
        ends = np.searchsorted(-level, -np.arange(heights), side="right")
        result = np.empty((len(always), heights, always.shape[1]), dtype=np.int32)
        result[:, -1] = always
        for h in reversed(range(heights - 1)):
            result[:, h] = result[:, h + 1]
            some = slice(ends[h + 1], ends[h])
            # Of several modes at one place the one with the fewest devices comes last, and stays.
            at = bound[some], h, p[some]
            result[at] = np.minimum(result[at], devices[some])
        return result

    @property
    def _cuts(self) -> NDArray[np.intp]:
        return np.arange(len(self.row))

    @cached_property
    def tails(self) -> Shares:
        """For a stage after this row's end that also takes the parts from cut c on."""
        last = len(self.row.parts)
        at = self._cuts, np.full(last + 1, last)
        border = self.row.matrices().border[at]
        # What the tail sends on no longer enters the stage; what the tail reads does.
        enter = border.entering - border.leaving
        leave = border.leaving_gradients - border.entering_gradients
        return self._shares(at, enter, leave, enter)

    @cached_property
    def heads(self) -> Shares:
        """For a stage before this row's start that also takes the parts up to cut c."""
        at = np.zeros(len(self.row), dtype=np.intp), self._cuts
        border = self.row.matrices().border[at]
        # What only the head reads no longer leaves the stage; what the head makes does.
        enter = border.entering_gradients - self.row.done(gradients=True)
        leave = border.leaving - self.row.done(gradients=False)
        return self._shares(at, enter, leave, enter - enter)

    def _shares(self, at: Places, enter: Traffic, leave: Traffic, held: Traffic) -> Shares:
        sizes, weights = self.sizes, self._weights(at)
        nothing = held - held
        memory = self._memory(replace(weights, border=Border(held, nothing, enter - held, nothing)))
        samples = sizes.samples[..., None]
        return Shares(
            self.compute_s(at),
            np.maximum(enter.at(samples), leave.at(samples)) * sizes.share[:, None],
            weights.trainable * sizes.ring_per_byte[:, None],
            memory.fixed,
            memory.flight,
        )
