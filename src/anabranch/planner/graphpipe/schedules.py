"""Schedule configurations, and prices of stages in each: GraphPipe, section 6, appendix A.1.

A configuration is c = (i, b, k): samples in flight, micro-batch size, and kFkB. The search
enumerates (b, k) and the number of replicas; i follows from the stages after it (Table 2,
``plans.in_flight``), and memory says how large it may be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from functools import cached_property

import numpy as np

from anabranch.cost.nested_sets import Floats, Ints, NestedSets
from anabranch.planner.toolkit.prices import UNBOUNDED, MicrobatchPrices, Mode
from anabranch.plans.in_flight import in_flight_samples
from anabranch.remembered import remembered

ENDLESS = 1 << 40
"""More samples than any schedule has in flight."""


@dataclass(frozen=True, slots=True)
class Configuration:
    """The enumerated part of c = (i, b, k): micro-batch size and kFkB."""

    microbatch_size: int
    k: int = 1


@dataclass(frozen=True, eq=False)
class Schedules:
    """The set C of candidate configurations, and EstimateTPS and Algorithm 2 for all at once.

    Attributes:
        prices: prices at the micro-batch size of each configuration.
        unit: devices in a group; stages get whole groups.
    """

    configurations: tuple[Configuration, ...]
    prices: tuple[MicrobatchPrices, ...]
    unit: int = 1

    @cached_property
    def modes(self) -> tuple[Mode, ...]:
        """Ways to use devices that some configuration has, fewest devices first."""
        modes = {mode for size in self.prices for mode in size.modes}
        usable = [mode for mode in modes if mode.replicas % self.unit == 0]
        return tuple(sorted(usable, key=lambda mode: (mode.replicas, mode.recompute)))

    @cached_property
    def devices(self) -> Ints:
        """Groups of devices of each mode."""
        return np.array([mode.replicas // self.unit for mode in self.modes], dtype=np.int64)

    @cached_property
    def alone(self) -> tuple[int, ...]:
        """Samples that a stage without successors holds, per configuration: one group."""
        return tuple(c.k * c.microbatch_size for c in self.configurations)

    @cached_property
    def more(self) -> Ints:
        """Samples that a stage holds beyond those of its successor: [configuration, successor's].

        ComputeInFlight of Table 2, which adds to what the successor holds.
        """
        chosen = self.configurations
        table = [
            [in_flight_samples(x.k, x.microbatch_size, y.k, y.microbatch_size, 0) for y in chosen]
            for x in chosen
        ]
        return np.array(table, dtype=np.int64)

    @remembered
    def tables(self, row: NestedSets, starts: int | None = None) -> tuple[Floats, Ints]:
        """Return time per sample, and most samples in flight that fit into memory, of the ranges of
        a row as single stages: [configuration, mode, start, stop]. The time is infinite for empty
        ranges and modes that may not be used. Ranges begin at the first ``starts`` items.
        """
        starts = len(row) if starts is None else starts
        shape = len(self.configurations), len(self.modes), starts, len(row)
        tps, room = np.full(shape, np.inf), np.full(shape, -1, dtype=np.int64)
        for x, prices in enumerate(self.prices):
            size = prices.microbatch_size
            usable = [(k, mode) for k, mode in enumerate(self.modes) if mode in prices.modes]
            if not usable:
                continue
            ranges, footprint = row.stages(starts)
            at, modes = zip(*usable, strict=True)
            ways = [(*prices.rates(mode.replicas), *astuple(mode)) for mode in modes]
            *rates, replicas, recompute = np.transpose(ways)[..., None]
            running = [row.compute_s(w[0], recompute=bool(w[-1])) for w in ways]
            places = x, np.array(at)[:, None], ranges.lower, ranges.upper
            compute_s = np.stack([ranges.difference(seconds) for seconds in running])
            tps[places] = prices.period_s(footprint, compute_s, rates) / size
            height = prices.headroom(footprint, replicas, recompute=recompute).astype(np.int64)
            room[places] = np.where(height == UNBOUNDED, ENDLESS, (height + 1) * size)
        return tps, room

    @remembered
    def tail_s(self, row: NestedSets) -> Floats:
        """Return compute seconds per sample of the items behind each cut, in the fastest mode."""
        running = [
            row.compute_s(prices.samples(degree)) / prices.microbatch_size
            for prices in self.prices
            for degree in prices.degrees
        ]
        return np.asarray(np.min([seconds[-1] - seconds[:-1] for seconds in running], axis=0))


def configurations(sizes: Sequence[int], most: int) -> tuple[Configuration, ...]:
    """Micro-batch sizes with k = 1, 2, 4 ...; groups hold up to ``most`` samples."""
    return tuple(
        Configuration(size, 1 << i)
        for size in sizes
        for i in range(most.bit_length())
        if size << i <= most
    )
