"""Periods and memory of every stage of a lattice at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from anabranch.cost import CostModel
from anabranch.cost.communication import all_reduce_s
from anabranch.cost.nested_weights import NestedSets, Pairs
from anabranch.cost.period import spread_s, traffic_s, work_s
from anabranch.cost.stage_weights import Border, StageWeights
from anabranch.graph.opgraph import bits
from anabranch.planner.partitioner.exact.lattice import Lattice
from anabranch.planner.toolkit.prices import Bound, MicrobatchPrices, Mode

NEVER = float(1 << 28)
"""More devices than there are."""

Floats = NDArray[np.float64]
Ints = NDArray[np.int32]
Bools = NDArray[np.bool_]


class LatticeWeights:
    """What the stages of a lattice weigh, whatever the micro-batch size.

    Args:
        atoms: per operator of the lattice's graph, the operators of ``cost.graph``.
    """

    def __init__(self, cost: CostModel, lattice: Lattice, atoms: Sequence[int]) -> None:
        self.cost = cost
        self.lattice = lattice
        self.atoms = tuple(atoms)
        self.sets = NestedSets(cost, [self._expanded(downset) for downset in lattice.downsets])
        self.pairs = Pairs(lattice.below, lattice.above)

    def _expanded(self, atoms: int) -> int:
        return sum(self.atoms[atom] for atom in bits(atoms))

    def mask(self, pair: int) -> int:
        """Operators of ``cost.graph`` in a stage."""
        return self._expanded(self.lattice.mask(pair))

    def of_stages(self, tensor: int) -> StageWeights:
        """Bytes of every stage."""
        if tensor not in self._known:
            self._known[tensor] = self.sets.between(self.pairs, tensor, self._border)
        return self._known[tensor]

    @cached_property
    def _known(self) -> dict[int, StageWeights]:
        return {}

    @cached_property
    def _border(self) -> Border:
        return self.sets.border(self.pairs)


@dataclass(frozen=True)
class PricedStages:
    """The stages of a lattice at one micro-batch size; arrays are [mode, pair].

    Attributes:
        modes: fewest devices first.
        slowest_s: seconds of compute or transfers per micro-batch, whichever is more.
        path_share: what the stage adds to a way through it (compute, what it reads and the
            gradients of that, and the all-reduce spread over the micro-batches), divided by so much
            that the stages of a plan stay below 1.
        reduce_s: seconds of all-reduce per step.
        spread_s: the period, with the all-reduce spread over the micro-batches.
        headroom: the largest height at which the stage fits.
    """

    modes: tuple[Mode, ...]
    slowest_s: Floats
    path_share: Floats
    reduce_s: Floats
    spread_s: Floats
    headroom: Ints

    @staticmethod
    def of(weights: LatticeWeights, prices: MicrobatchPrices, heights: int) -> PricedStages:
        """Price all stages, with recomputation where one does not fit at all heights without."""
        columns = []
        modes: list[Mode] = []
        roomy: set[tuple[int, int]] = set()
        for mode in prices.modes:
            if mode.recompute and (mode.replicas, mode.tensor) in roomy:
                continue
            modes.append(mode)
            columns.append(_price(weights, prices, mode))
            if (columns[-1][-1] >= heights - 1).all():
                roomy.add((mode.replicas, mode.tensor))
        slowest, path, compute, reduce_s, room = map(np.stack, zip(*columns, strict=True))
        spread = spread_s(compute, reduce_s, prices.num_microbatches)
        path = path + spread
        return PricedStages(
            tuple(modes),
            slowest_s=slowest,
            path_share=path / (2 * len(weights.atoms) * path.max(initial=1e-300)),
            reduce_s=reduce_s,
            spread_s=slowest + spread,
            headroom=room,
        )

    def periods(self, bound: Bound) -> Floats:
        """Periods of stages within a bound, ascending; of those equal up to rounding the last."""
        periods = self.spread_s if bound.spread else self.slowest_s
        values = np.unique(periods[self.within(bound)])
        last = np.append(np.diff(values) > 1e-12 * values[1:], True)[: len(values)]
        return np.asarray(values[last])

    def within(self, bound: Bound) -> Bools:
        """Which stages keep a bound."""
        periods = self.spread_s if bound.spread else self.slowest_s
        return (periods <= bound.period_s) & (self.reduce_s <= bound.reduce_s)

    def need(self, within: Bools, heights: int) -> Floats:
        """Fewest devices per stage, and as a fraction its share of a path: [height, pair].

        One row where no height is too great.
        """
        fits = np.where(within, self.headroom, -1)
        rows = heights if ((fits >= 0) & (fits < heights - 1)).any() else 1
        result = np.full((rows, fits.shape[1]), NEVER)
        for k, mode in enumerate(self.modes):
            value = mode.devices + self.path_share[k]
            for h in range(rows):
                # Modes come with ever more devices, so what is there is not worse.
                better = (fits[k] >= (h if rows > 1 else heights - 1)) & (value < result[h])
                result[h, better] = value[better]
        return result

    def mode(self, within: Bools, pair: int, height: int, devices: int) -> Mode:
        """The mode of a stage with that many devices at that height: that of ``need``."""
        chosen = [
            (self.path_share[k, pair], k)
            for k, mode in enumerate(self.modes)
            if mode.devices == devices and within[k, pair] and self.headroom[k, pair] >= height
        ]
        return self.modes[min(chosen)[1]]


def _price(
    weights: LatticeWeights, prices: MicrobatchPrices, mode: Mode
) -> tuple[Floats, Floats, Floats, Floats, Ints]:
    """Slowest and path seconds, those of compute and of the all-reduce, and the headroom of every
    stage.
    """
    n, price = prices.samples(mode.replicas), prices.cost.border_price(mode.devices)
    running = weights.sets.compute_s(n, mode.tensor, recompute=mode.recompute)
    compute = weights.pairs.difference(running)
    stages = weights.of_stages(mode.tensor)
    border = stages.border
    read = (border.entering + border.leaving_gradients).at(n)
    return (
        work_s(compute, traffic_s(border.comes, border.goes, n, price)),
        compute + read * price,
        compute,
        all_reduce_s(stages.trainable, *prices.ring(mode.replicas, mode.tensor)),
        prices.headroom(stages, mode.replicas, recompute=mode.recompute),
    )
