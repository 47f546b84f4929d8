"""Piper's prices of a stage: its load, and how many micro-batches it can keep in flight.

For a stage on d replicas, n = ceil(b / d) samples of a micro-batch on each
replica, M micro-batches:

    load    compute                     forward and backward at n samples,
                                        the forward once more with recomputation
          + (in + out) * price(d)       all that crosses its border: values and gradients, both ways
          + allreduce(d) / M            of its trainable parameters, once per step

Nothing overlaps: a load is a sum. The price of a byte is ``border_price``; the paper has one
bandwidth. Every pair of downsets first gets a lower bound that costs one subtraction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from anabranch.cost import CostModel
from anabranch.cost.communication import all_reduce_s
from anabranch.cost.footprint import StageFootprint
from anabranch.cost.nested_sets import Floats, Ints, NestedSets, Pairs
from anabranch.planner.piper.search import NEVER, OPTION, StageOptions, joined
from anabranch.planner.toolkit.downsets import nested_pairs
from anabranch.planner.toolkit.prices import ROUNDING, UNBOUNDED, MicrobatchPrices, Mode

_AT_ONCE = 1 << 20
"""Pairs that are priced at once."""


@dataclass(frozen=True)
class DownsetPairs:
    """Downsets, nested pairs, and least bytes per sample across the border of each pair's stage."""

    downsets: NestedSets
    pairs: Pairs
    traffic: NDArray[np.float32]

    @staticmethod
    def of(cost: CostModel, masks: Sequence[int], budget: int) -> DownsetPairs:
        """Return all nested pairs of these downsets, which ascend by size.

        Raises:
            BudgetError: if there are more than ``budget``.
        """
        downsets, pairs = NestedSets(cost, masks), nested_pairs(cost.graph, masks, budget)
        return DownsetPairs(downsets, pairs, downsets.least_traffic(pairs))


class DownsetPrices:
    """Prices the stages between nested downsets at one micro-batch size."""

    def __init__(self, prices: MicrobatchPrices, downsets: NestedSets) -> None:
        self.prices = prices
        self.downsets = downsets
        self.modes = prices.modes  # each followed by itself with recomputation

    @cached_property
    def floor_s(self) -> float:
        """Lower bound of all loads: all work, each operator at its cheapest, shared evenly."""
        work = [seconds * replicas for replicas, seconds in self._least_s.items()]
        return float(np.min(work, axis=0).sum()) / self.prices.cost.cluster.num_devices

    @cached_property
    def _least_s(self) -> dict[int, Floats]:
        """Replicas -> least seconds that each operator adds to the load, without latency."""
        prices, summed = self.prices, self.prices.cost.own_parameter_bytes.summed
        return {
            replicas: np.add(*prices.cost.op_seconds(prices.samples(replicas)))
            + summed * prices.ring(replicas)[0] / prices.num_microbatches
            for replicas in prices.degrees
        }

    def fewest_devices(self, space: DownsetPairs, bound_s: float) -> Ints:
        """Return the fewest devices per pair within the bound; ``NEVER`` if no number is."""
        result = np.full(len(space.pairs), NEVER, dtype=np.int32)
        for replicas in reversed(self.prices.degrees):
            least = self.downsets.sums(self._least_s[replicas])
            crossing = self.prices.cost.border_price(replicas) * self.prices.samples(replicas)
            for start in range(0, len(result), _AT_ONCE):
                some = slice(start, start + _AT_ONCE)
                load = space.pairs[some].difference(least) + space.traffic[some] * crossing
                result[some][load <= bound_s * ROUNDING] = replicas
        return result

    def options(self, pairs: Pairs, room: Ints, bound_s: float) -> StageOptions:
        """Return the stages that fit within a bound on the load and in ``room`` devices per pair.

        Recomputation is an option only where memory might ask for it.
        """
        kept = []
        for start in range(0, len(pairs), _AT_ONCE):
            some = slice(start, start + _AT_ONCE)
            kept.append(self._block(pairs[some], room[some], bound_s))
        return joined(kept)

    def _block(self, pairs: Pairs, room: Ints, bound_s: float) -> StageOptions:
        border, kept = self.downsets.border(pairs), []
        for index, mode in enumerate(self.modes):
            if not mode.recompute:
                some = np.flatnonzero(room >= mode.replicas)
                chosen, crossing = pairs[some], border[some]
            footprint = self.downsets.between(chosen, crossing)
            load = self._load_s(chosen, footprint, mode)
            some = np.flatnonzero(load <= bound_s)
            chosen, footprint, load = chosen[some], footprint[some], load[some]
            held = self._held(footprint, mode)
            # A stage that can hold all micro-batches has over UNBOUNDED, however few these are.
            keep = held >= np.where(chosen.upper == len(self.downsets) - 1, 1, 2)
            records = np.zeros(np.count_nonzero(keep), OPTION).view(np.recarray)
            records.lo, records.hi = chosen.lower[keep], chosen.upper[keep]
            records.devices, records.mode = mode.replicas, index
            records.load_s, records.held = load[keep], held[keep]
            kept.append(records)
            # The next mode recomputes: never faster, so only for stages that cannot hold all.
            some = np.flatnonzero(held <= UNBOUNDED)
            chosen, crossing = chosen[some], footprint.border[some]
        return joined(kept)

    def _load_s(self, pairs: Pairs, footprint: StageFootprint, mode: Mode) -> Floats:
        """Return the load of each stage, in seconds per micro-batch."""
        prices, border = self.prices, footprint.border
        n = prices.samples(mode.replicas)
        compute = self.downsets.compute_s(n, recompute=mode.recompute)
        traffic = border.comes.at(n) + border.goes.at(n)
        reduce_s = all_reduce_s(footprint.held.summed, *prices.ring(mode.replicas))
        load = pairs.difference(compute) + traffic * prices.cost.border_price(mode.replicas)
        return np.asarray(load + reduce_s / prices.num_microbatches)

    def _held(self, footprint: StageFootprint, mode: Mode) -> Ints:
        """Return how many micro-batches can be in flight: 0 if none, over ``UNBOUNDED`` if all."""
        room = self.prices.headroom(footprint, mode.replicas, recompute=mode.recompute)
        return room + np.int32(1)
