"""Data parallelism: the whole model on every device, gradients accumulated over micro-batches.

Where the profile has costs for it, several devices may hold one replica together (tensor
parallelism); such a group lies inside a node. Recomputation saves nothing here: with one
micro-batch in flight its insides are kept at once either way.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from anabranch.cluster import GIB
from anabranch.cost import CostModel
from anabranch.errors import InfeasiblePlanError
from anabranch.planner.toolkit.assemble import Assembler, Candidate
from anabranch.planner.toolkit.infeasible import require_sizes
from anabranch.planner.toolkit.parts import Facts, Part, PartPrices
from anabranch.planner.toolkit.prices import Prices, microbatch_sizes
from anabranch.plans.slices import priced
from anabranch.plans.stages import StageGraph


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
        ways = data_parallel(cost, batch_size, microbatch_size, total)
        found = sorted(ways, key=lambda each: each.step_s)
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
            if size >= total and priced(cost, batch_size, size, total)
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
    cost: CostModel,
    batch_size: int,
    microbatch_size: int | None,
    max_replicas: int,
    *,
    facts: Facts | None = None,
) -> Iterator[Candidate]:
    """The candidates, in the order of micro-batch sizes; none beyond ``max_replicas``.

    Args:
        cost: prices the operators.
        batch_size: samples of one step.
        microbatch_size: only this size.
        max_replicas: replicas of a stage at most.
        facts: what sets of operators weigh, if that is known.
    """
    total, node = cost.cluster.num_devices, cost.cluster.group_sizes[0]
    facts = facts or Facts(cost)
    everything = (1 << len(cost.graph)) - 1
    order = tuple(range(len(cost.graph)))
    for size in [microbatch_size] if microbatch_size else microbatch_sizes(batch_size):
        for tensor in (t for t in cost.tensor_degrees if node % t == 0 and total % t == 0):
            replicas = total // tensor
            prices = Prices(cost, batch_size, size, (replicas,), cost.cluster.memory_bytes)
            if replicas > max_replicas or not prices.may(replicas):
                continue
            part = Part(everything, replicas, tensor=tensor)
            candidate = Assembler(PartPrices(prices, facts), order, total).assemble([part])
            if candidate is not None:
                yield candidate
