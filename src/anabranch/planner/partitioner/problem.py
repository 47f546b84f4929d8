"""What is to be planned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from anabranch.cost import CostModel
from anabranch.planner.partitioner.chains import Chain
from anabranch.planner.partitioner.reach import Reach
from anabranch.planner.partitioner.solved import Found
from anabranch.planner.toolkit.assemble import Assembler
from anabranch.planner.toolkit.parts import Facts, PartPrices
from anabranch.planner.toolkit.prices import Bound, Prices, degrees

MOST_UNEVEN = 128
"""Operators of a row for which numbers of replicas besides the powers of two are tried."""

SHORT = 10
"""Models of up to so many operators are searched as closely as can be: that takes no time."""


@dataclass(frozen=True)
class Problem:
    """What is to be planned.

    Attributes:
        cost: prices the operators on the cluster.
        chain: the model.
        order: its operators, branch after branch.
        batch_size: samples of one step.
        max_replicas: replicas per stage at most.
        chained: every stage waits for the one before it.
        tolerance: how near to the least period the search must come, relative.
        recompute: stages may recompute.
        uneven: in a short row or model numbers of replicas besides the powers of two are tried.
    """

    cost: CostModel
    chain: Chain
    order: tuple[int, ...]
    batch_size: int
    max_replicas: int
    chained: bool
    tolerance: float
    recompute: bool = False
    uneven: bool = True

    @cached_property
    def facts(self) -> Facts:
        """What sets of operators weigh."""
        return Facts(self.cost)

    def prices(self, microbatch_size: int, limit: int | None = None) -> Prices:
        """Prices at one micro-batch size.

        Args:
            microbatch_size: samples of one micro-batch.
            limit: devices, if there are other than those of the cluster.
        """
        devices = limit or self.cost.cluster.num_devices
        most = min(devices, self.max_replicas)
        node = self.cost.cluster.group_sizes[0]
        return Prices(
            self.cost,
            self.batch_size,
            microbatch_size,
            degrees(
                self.cost,
                microbatch_size,
                most,
                batch_size=self.batch_size,
                uneven=self.uneven and self._is_short_row,
            ),
            self.cost.cluster.memory_bytes,
            tensors=tuple(t for t in self.cost.tensor_degrees if t <= devices and node % t == 0),
            recompute=self.recompute,
            max_devices=devices,
        )

    @cached_property
    def _is_short_row(self) -> bool:
        """Whether more numbers of replicas cost little time: not many operators, or no branches."""
        few = len(self.cost.graph) <= SHORT
        return few or (not self.chain.blocks and len(self.chain.items) <= MOST_UNEVEN)

    def assembler(self, prices: Prices) -> Assembler:
        """What makes stage graphs of parts at these prices."""
        known = self._assemblers.get(prices.microbatch_size)
        if known is None or known.prices.prices is not prices:
            parts = PartPrices(prices, self.facts)
            known = Assembler(parts, self.order, self.max_replicas, self.chained)
            self._assemblers[prices.microbatch_size] = known
        return known

    @cached_property
    def _assemblers(self) -> dict[int, Assembler]:
        return {}

    def reach(self, *prices: Prices, limit: int | None = None) -> Reach:
        """What searches this model at these prices."""
        return Reach(self.chain, prices, limit=limit or self.cost.cluster.num_devices)

    def fewest_devices(
        self, microbatch_size: int, *, memory_bytes: float | None = None, limit: int | None = None
    ) -> int:
        """Devices with which there is a plan, however slow; more than ``limit`` if there is none.

        Args:
            microbatch_size: samples of one micro-batch.
            memory_bytes: memory of a device, if other than the cluster's.
            limit: devices at most, if other than the cluster's.
        """
        found = self._with_fewest(microbatch_size, memory_bytes, limit)[1]
        return int(found.devices[0, 0])

    def _with_fewest(
        self, microbatch_size: int, memory_bytes: float | None, limit: int | None = None
    ) -> tuple[Prices, Found]:
        prices = self.prices(microbatch_size, limit)
        if memory_bytes is not None:
            prices = replace(prices, memory_bytes=memory_bytes)
        return prices, self.reach(prices, limit=limit).solve([Bound(float("inf"))])

    def fills(self, sizes: Sequence[int], memory_bytes: float) -> bool:
        """Whether so much memory suffices for a plan on all devices, at the least or most of some
        micro-batch sizes.
        """
        covered = [size for size in sizes if self.prices(size).degrees]
        for size in dict.fromkeys((covered[0], covered[-1])):
            prices, found = self._with_fewest(size, memory_bytes)
            if found.devices[0, 0] <= self.cost.cluster.num_devices:
                assembler = Assembler(
                    PartPrices(prices, self.facts), self.order, self.max_replicas, self.chained
                )
                if assembler.assemble(found.parts(0)) is not None:
                    return True
        return False
