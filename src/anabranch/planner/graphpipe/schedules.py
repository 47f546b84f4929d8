"""Schedule configurations, and what a stage may be in each: GraphPipe, section 6 and appendix A.1.

A configuration is c = (i, b, k): samples in flight, micro-batch size, and kFkB. The search
enumerates (b, k) and the number of replicas; i follows from the stages after it (Table 2,
``plans.in_flight``), and memory says how large it may be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from anabranch.cost.nested_weights import NestedSets
from anabranch.planner.toolkit.prices import UNBOUNDED, MicrobatchPrices, Mode
from anabranch.plans.in_flight import in_flight_samples

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

ENDLESS = 1 << 40
"""More samples than are ever in flight."""


@dataclass(frozen=True, slots=True)
class Configuration:
    """What of c = (i, b, k) is enumerated: micro-batch size and kFkB."""

    microbatch_size: int
    k: int = 1


@dataclass(frozen=True, eq=False)
class StageTables:
    """Ranges of a row as single stages, [configuration, mode, start, stop].

    Attributes:
        tps: seconds per sample; infinite for ranges without items and modes that may not be used.
        room: most samples in flight that fit into memory.
    """

    tps: Floats
    room: Ints

    @cached_property
    def quickest(self) -> Floats:
        """Least seconds per sample in any way: [start, stop]."""
        return np.asarray(self.tps.min(axis=(0, 1)))


@dataclass(frozen=True, eq=False)
class Schedules:
    """The set C of candidate configurations, and EstimateTPS and Algorithm 2 for all at once.

    Attributes:
        prices: per configuration, of its micro-batch size.
        unit: devices come in groups of so many.
    """

    configurations: tuple[Configuration, ...]
    prices: tuple[MicrobatchPrices, ...]
    unit: int = 1

    @cached_property
    def modes(self) -> tuple[Mode, ...]:
        """Ways to use devices that some configuration has, fewest devices first."""
        found = {mode for size in self.prices for mode in size.modes}
        usable = [mode for mode in found if mode.devices % self.unit == 0]
        return tuple(sorted(usable, key=lambda m: (m.devices, m.recompute, m.tensor)))

    @cached_property
    def devices(self) -> Ints:
        """Groups of devices of each mode."""
        return np.array([mode.devices // self.unit for mode in self.modes], dtype=np.int64)

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

    def tables(self, row: NestedSets, starts: int) -> StageTables:
        """Time per sample and memory of the ranges of a row that begin at its first so many."""
        shape = len(self.configurations), len(self.modes), starts, len(row)
        tps, room = np.full(shape, np.inf), np.full(shape, -1, dtype=np.int64)
        for x, prices in enumerate(self.prices):
            for tensor in prices.tensors:
                found = [mode for mode in self.modes if mode.tensor == tensor]
                used = [mode for mode in found if mode in prices.modes]
                if used:
                    k = [self.modes.index(mode) for mode in used]
                    tps[x, k], room[x, k] = _stages(prices, row, used, starts)
        tps[:, :, *np.tril_indices(starts, m=len(row))] = np.inf
        return StageTables(tps, room)


def _stages(
    prices: MicrobatchPrices, row: NestedSets, modes: Sequence[Mode], starts: int
) -> tuple[Floats, Ints]:
    """Seconds per sample, and samples that fit, in modes of as many devices per replica:
    [mode, start, stop].
    """
    weights = row.matrices(modes[0].tensor, starts)
    rates = np.array([prices.rates(mode) for mode in modes]).T[..., None, None]
    used = np.array([(mode.replicas, mode.recompute) for mode in modes]).T[..., None, None]
    running = np.stack(
        [
            row.compute_s(prices.samples(mode.replicas), mode.tensor, recompute=mode.recompute)
            for mode in modes
        ]
    )
    seconds = prices.period_s(weights, running[:, None] - running[:, :starts, None], rates)
    height = prices.headroom(weights, used[0], recompute=used[1]).astype(np.int64)
    size = prices.microbatch_size
    return seconds / size, np.where(height == UNBOUNDED, ENDLESS, (height + 1) * size)


def configurations(sizes: Sequence[int], most: int) -> tuple[Configuration, ...]:
    """Micro-batch sizes with k = 1, 2, 4 ...; groups hold up to ``most`` samples."""
    return tuple(
        Configuration(size, 1 << i)
        for size in sizes
        for i in range(most.bit_length())
        if size << i <= most
    )
