"""The simplest pipeline: as many stages as devices, each with about the same work.

What torchgpipe's ``balance`` does: the model in one order, cut into contiguous runs so that the
longest run is as short as can be. Communication plays no part, and memory none but to reject what
does not fit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from anabranch.cluster import GIB
from anabranch.cost import CostModel
from anabranch.errors import InfeasiblePlanError
from anabranch.graph.series_parallel import decompose, operators
from anabranch.planner.base import require_options
from anabranch.planner.partitioner.chains import line
from anabranch.planner.partitioner.search import Problem
from anabranch.planner.toolkit.assemble import Assembler, Candidate
from anabranch.planner.toolkit.infeasible import explain, require_sizes
from anabranch.planner.toolkit.parts import Part, PartPrices
from anabranch.planner.toolkit.prices import Prices, degrees, microbatch_sizes
from anabranch.plans.slices import priced
from anabranch.plans.stages import StageGraph


@dataclass(frozen=True)
class Even:
    """Contiguous runs of equal work, one per device; replicas where there are fewer operators.

    Attributes:
        max_replicas: replicas per stage at most. None: no limit.
    """

    max_replicas: int | None = None

    schedules: ClassVar[tuple[str, ...]] = ("gpipe",)

    def __post_init__(self) -> None:
        require_options("even", self, max_replicas=1)

    def __call__(
        self, cost: CostModel, *, batch_size: int, microbatch_size: int | None = None
    ) -> list[StageGraph]:
        """Propose one stage graph per micro-batch size; see ``planner.base``.

        Raises:
            InfeasiblePlanError: if none of them fits.
        """
        limit = self.max_replicas or cost.cluster.num_devices
        require_sizes(cost, batch_size, microbatch_size, limit)
        found = sorted(
            self._propose(cost, batch_size, microbatch_size, limit), key=lambda each: each.step_s
        )
        if not found:
            raise self._explain(cost, batch_size, microbatch_size, limit)
        return [candidate.graph for candidate in found]

    @staticmethod
    def _propose(
        cost: CostModel, batch_size: int, microbatch_size: int | None, limit: int
    ) -> Iterator[Candidate]:
        order = tuple(operators(decompose(cost.graph)))
        memory = cost.cluster.memory_bytes
        count = min(cost.cluster.num_devices, len(order))
        for size in [microbatch_size] if microbatch_size else microbatch_sizes(batch_size):
            if not priced(cost, batch_size, size, 1):
                continue
            chosen = degrees(cost, size, limit, batch_size=batch_size)
            prices = Prices(cost, batch_size, size, chosen, memory)
            forward, backward = cost.op_seconds(size)
            runs = even_runs([float((forward + backward)[op]) for op in order], count)
            parts = [Part(sum(1 << op for op in order[i:j]), 1) for i, j in runs]
            candidate = Assembler(PartPrices(prices), order, limit, chained=True).assemble(parts)
            if candidate is not None:
                yield candidate

    @staticmethod
    def _explain(
        cost: CostModel, batch_size: int, microbatch_size: int | None, limit: int
    ) -> InfeasiblePlanError:
        order = tuple(operators(decompose(cost.graph)))
        problem = Problem(cost, line(cost, order), order, batch_size, limit, True, 0.01)
        name, cluster = cost.graph.name or "the model", cost.cluster
        sizes = [microbatch_size] if microbatch_size else microbatch_sizes(batch_size)
        if problem.fills(sizes, cluster.memory_bytes):
            return InfeasiblePlanError(
                f"with stages of equal work {name} does not fit the "
                f"{cluster.memory_bytes / GIB:.1f} GiB per device of {cluster.name}, and planner "
                "even tries no others; planners sequential and graphpipe have stages that fit"
            )
        return InfeasiblePlanError(
            f"{name} does not fit {cluster.name} with stages of equal work, nor with other stages "
            f"in a row: {explain(problem, microbatch_size)}"
        )


def even_runs(seconds: Sequence[float], count: int) -> list[tuple[int, int]]:
    """Cut a row into ``count`` non-empty runs whose longest is as short as can be.

    Args:
        seconds: what each place takes.
        count: number of runs, at most ``len(seconds)``.

    Returns:
        The runs as (start, stop). Time: O(n^2 * count).
    """
    n = len(seconds)
    sums = [0.0]
    for each in seconds:
        sums.append(sums[-1] + each)
    longest = [sums[j] if j else 0.0 for j in range(n + 1)]
    starts: list[list[int]] = []
    for k in range(2, count + 1):
        following = [float("inf")] * (n + 1)
        chosen = [0] * (n + 1)
        for j in range(k, n + 1):
            for i in range(j - 1, k - 2, -1):
                value = max(longest[i], sums[j] - sums[i])
                if value < following[j]:
                    following[j], chosen[j] = value, i
                if sums[j] - sums[i] >= following[j]:
                    break
        longest = following
        starts.append(chosen)
    runs = []
    j = n
    for chosen in reversed(starts):
        runs.append((chosen[j], j))
        j = chosen[j]
    return [(0, j), *reversed(runs)]
