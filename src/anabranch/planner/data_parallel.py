"""Data parallelism: the whole model on every device, gradients accumulated over micro-batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from anabranch.cluster import GIB
from anabranch.cost import CostModel
from anabranch.errors import InfeasiblePlanError
from anabranch.planner.infeasible import require_sizes
from anabranch.planner.partitioner.assemble import Assembler, Candidate
from anabranch.planner.partitioner.parts import Part, PartPrices
from anabranch.planner.partitioner.prices import Prices, microbatch_sizes
from anabranch.planner.stages import StageGraph


@dataclass(frozen=True)
class DataParallel:
    """One stage on all devices, for every micro-batch size; the least estimated step first."""

    schedules: ClassVar[tuple[str, ...]] = ("1f1b",)

    def __call__(
        self, cost: CostModel, *, batch_size: int, microbatch_size: int | None = None
    ) -> list[StageGraph]:
        """Propose one stage graph per micro-batch size; see ``planner.base``.

        Raises:
            InfeasiblePlanError: if the model does not fit a device, or no micro-batch gives every
                device a sample count in the profile.
        """
        total = cost.cluster.num_devices
        require_sizes(cost, batch_size, microbatch_size, total)
        found = sorted(
            data_parallel(cost, batch_size, microbatch_size, total), key=lambda each: each.step_s
        )
        if not found:
            raise self._explain(cost, batch_size, microbatch_size)
        return [candidate.graph for candidate in found]

    @staticmethod
    def _explain(
        cost: CostModel, batch_size: int, microbatch_size: int | None
    ) -> InfeasiblePlanError:
        total = cost.cluster.num_devices
        sizes = [
            size
            for size in ([microbatch_size] if microbatch_size else microbatch_sizes(batch_size))
            if size >= total and cost.covers(-(-size // total))
        ]
        if not sizes:
            return InfeasiblePlanError(
                f"data parallelism on the {total} devices of {cost.cluster.name} needs "
                f"micro-batches of at least {total} samples within the profile "
                f"({cost.profile.origin}); use a larger batch than {batch_size}, fewer devices, "
                "or planner graphpipe"
            )
        need = cost.device_bytes(
            range(len(cost.graph)),
            microbatch_size=-(-sizes[0] // total) * total,
            replicas=total,
            in_flight=1,
        )
        return InfeasiblePlanError(
            f"data parallelism needs {need / GIB:.1f} GiB on each device at "
            f"{-(-sizes[0] // total)} samples; {cost.cluster.name} has "
            f"{cost.cluster.memory_bytes / GIB:.1f} GiB: more devices do not help below that, "
            "planner graphpipe may"
        )


def data_parallel(
    cost: CostModel, batch_size: int, microbatch_size: int | None, max_replicas: int
) -> Iterator[Candidate]:
    """The candidates, in the order of micro-batch sizes; none beyond ``max_replicas``."""
    total = cost.cluster.num_devices
    everything = (1 << len(cost.graph)) - 1
    order = tuple(range(len(cost.graph)))
    for size in [microbatch_size] if microbatch_size else microbatch_sizes(batch_size):
        if total <= min(size, max_replicas) and cost.covers(-(-size // total)):
            prices = Prices(cost, batch_size, size, (total,), cost.cluster.memory_bytes)
            assembler = Assembler(PartPrices(prices), order, total)
            candidate = assembler.assemble([Part(everything, total)])
            if candidate is not None:
                yield candidate
