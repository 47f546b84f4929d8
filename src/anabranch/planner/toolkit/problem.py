"""Planning problem: a model on a cluster, the batch, and what stages may be."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from anabranch.cluster import Cluster
from anabranch.cost import CostModel
from anabranch.cost.nested_sets import NestedSets
from anabranch.errors import InfeasiblePlanError
from anabranch.graph.series_parallel import Node, decompose, operators
from anabranch.planner.toolkit.assemble import Assembler
from anabranch.planner.toolkit.prices import MicrobatchPrices
from anabranch.plans.stages import MOST_MICROBATCHES

MOST_DEVICES = 2**13
"""Devices that are planned for at most: tables of their pairs take a gigabyte."""

MOST_SAMPLES = 2**30
"""Samples of a batch that is planned at most: they are counted in 32 bits."""


def require_few_devices(cluster: Cluster) -> None:
    """Accept a cluster for which plans are searched.

    Raises:
        InfeasiblePlanError: if it has too many devices.
    """
    if cluster.num_devices > MOST_DEVICES:
        raise InfeasiblePlanError(
            f"{cluster.name} has {cluster.num_devices} devices; plans are searched for "
            f"{MOST_DEVICES} at most: plan for a part of the cluster, which several jobs or "
            "replicas of the whole pipeline can share"
        )


@dataclass(frozen=True)
class Problem:
    """A model, a cluster and the limits of a plan.

    Attributes:
        microbatch_size: the only size to plan with; None: all of ``sizes``.
        max_replicas: replicas per stage at most; None: no limit.
        chained: every stage waits for the one before it.
        any_degree: numbers of replicas need not be powers of two.
    """

    cost: CostModel
    batch_size: int
    microbatch_size: int | None = None
    max_replicas: int | None = None
    chained: bool = False
    recompute: bool = False
    any_degree: bool = False

    def checked(self) -> Problem:
        """Check the arguments that every planner takes, and return the problem.

        Raises:
            ValueError: for a batch or micro-batch that cannot be.
            InfeasiblePlanError: if the profile covers no micro-batch size, or there are more
                devices than operators, replicas and samples can use.
        """
        cost, limit = self.cost, self.most_replicas
        batch_size, microbatch_size = self.batch_size, self.microbatch_size
        if batch_size < 1:
            raise ValueError(f"the batch has {batch_size} samples; at least 1 is needed")
        if microbatch_size is not None and not 1 <= microbatch_size <= batch_size:
            raise ValueError(
                f"a micro-batch of {microbatch_size} samples does not fit a batch of {batch_size}"
            )
        if batch_size > MOST_SAMPLES:
            raise ValueError(
                f"the batch has {batch_size} samples; a batch of {MOST_SAMPLES} at most is planned"
            )
        if microbatch_size is not None and -(-batch_size // microbatch_size) > MOST_MICROBATCHES:
            raise ValueError(
                f"micro-batches of {microbatch_size} samples cut the batch of {batch_size} into "
                f"{-(-batch_size // microbatch_size)}; a stage has {MOST_MICROBATCHES} at most: "
                "name a larger micro-batch or a smaller batch"
            )
        require_few_devices(cost.cluster)
        powers = replace(self, any_degree=False)
        if not any(powers.prices(size).degrees for size in self.sizes):
            raise InfeasiblePlanError(
                f"the profile ({cost.profile.origin}) covers no way to run micro-batches of "
                f"{microbatch_size or f'1 to {batch_size}'} samples on up to "
                f"{limit} replicas per stage; profile again at more sample counts"
            )
        if self.usable < self.devices:
            raise InfeasiblePlanError(
                f"{self.use}, and a search uses all; plan for at most {self.usable}, capture finer "
                "operators, allow more replicas or take larger micro-batches"
            )
        return self

    @property
    def devices(self) -> int:
        return self.cost.cluster.num_devices

    @property
    def most_replicas(self) -> int:
        return min(self.max_replicas or self.devices, self.devices)

    @property
    def usable(self) -> int:
        """Devices that stages can use at most: one for each replica of an operator."""
        return len(self.cost.graph) * min(self.most_replicas, self.sizes[-1])

    @property
    def use(self) -> str:
        """Sentence on how many devices can be used."""
        graph, cluster = self.cost.graph, self.cost.cluster
        replicas = self.usable // len(graph)
        return (
            f"{graph.name or 'the model'} has {len(graph)} operator{'s' * (len(graph) > 1)} with "
            f"at most {replicas} replica{'s' * (replicas > 1)} each, which is enough for "
            f"{self.usable} of the {self.devices} devices of {cluster.name}"
        )

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
        """Micro-batch sizes to try, ascending: the fixed one, or powers of two and the batch,
        except those that make too many micro-batches.
        """
        if self.microbatch_size:
            return (self.microbatch_size,)
        powers = {1 << i for i in range(self.batch_size.bit_length())}
        sizes = sorted(powers | {self.batch_size})
        return tuple(b for b in sizes if -(-self.batch_size // b) <= MOST_MICROBATCHES)

    def prices(self, microbatch_size: int, devices: int | None = None) -> MicrobatchPrices:
        """Return prices at one micro-batch size.

        Args:
            devices: number of devices, if it is not the cluster's.
        """
        most = min(devices or self.devices, self.most_replicas)
        powers = [1 << i for i in range(most.bit_length())]
        prices = MicrobatchPrices(
            self.cost,
            self.batch_size,
            microbatch_size,
            (),
            self.cost.cluster.memory_bytes,
            recompute=self.recompute,
        )
        degrees = filter(prices.covers_replicas, range(1, most + 1) if self.any_degree else powers)
        return replace(prices, degrees=tuple(degrees))

    def assembler(self, prices: MicrobatchPrices) -> Assembler:
        return Assembler(prices, self.order, self.most_replicas, self.chained)
