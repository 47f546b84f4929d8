"""Planning problem: a model on a cluster, the batch, and what stages may be."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from anabranch.cost import CostModel
from anabranch.cost.nested_weights import NestedSets
from anabranch.graph.series_parallel import Node, decompose, operators
from anabranch.planner.toolkit.assemble import Assembler
from anabranch.planner.toolkit.parts import PartPrices
from anabranch.planner.toolkit.prices import MicrobatchPrices, degrees, microbatch_sizes


@dataclass(frozen=True)
class Problem:
    """A model, a cluster and the limits of a plan.

    Attributes:
        microbatch_size: the one to plan with; None: all that ``toolkit.prices`` tries.
        max_replicas: replicas per stage at most; None: no limit.
        chained: every stage waits for the one before it.
        any_degree: numbers of replicas that are no power of two as well.
    """

    cost: CostModel
    batch_size: int
    microbatch_size: int | None = None
    max_replicas: int | None = None
    chained: bool = False
    recompute: bool = False
    any_degree: bool = False

    @property
    def devices(self) -> int:
        """Devices of the cluster."""
        return self.cost.cluster.num_devices

    @property
    def most_replicas(self) -> int:
        """Replicas per stage at most."""
        return min(self.max_replicas or self.devices, self.devices)

    @cached_property
    def tree(self) -> Node:
        """The series-parallel structure of the model."""
        return decompose(self.cost.graph)

    @cached_property
    def order(self) -> tuple[int, ...]:
        """The operators, branch after branch."""
        return tuple(operators(self.tree))

    @cached_property
    def row(self) -> NestedSets:
        """The operators in this order: bytes and seconds of every run of them."""
        return NestedSets.row(self.cost, [1 << op for op in self.order])

    @property
    def sizes(self) -> tuple[int, ...]:
        """The micro-batch sizes to try, ascending."""
        return microbatch_sizes(self.batch_size, self.microbatch_size)

    def prices(self, microbatch_size: int, devices: int | None = None) -> MicrobatchPrices:
        """Prices at one micro-batch size.

        Args:
            devices: how many there are, if other than those of the cluster.
        """
        devices = devices or self.devices
        node = self.cost.cluster.group_sizes[0]
        return MicrobatchPrices(
            self.cost,
            self.batch_size,
            microbatch_size,
            degrees(
                self.cost,
                microbatch_size,
                min(devices, self.most_replicas),
                batch_size=self.batch_size,
                every=self.any_degree,
            ),
            self.cost.cluster.memory_bytes,
            tensors=tuple(t for t in self.cost.tensor_degrees if t <= devices and node % t == 0),
            recompute=self.recompute,
            max_devices=devices,
        )

    def assembler(self, prices: MicrobatchPrices) -> Assembler:
        """What makes stage graphs of parts at these prices."""
        return Assembler(PartPrices(prices), self.order, self.most_replicas, self.chained)
