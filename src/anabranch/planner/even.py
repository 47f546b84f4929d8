"""The simplest pipeline: as many stages as devices, each with about the same work.

As torchgpipe's ``balance``: contiguous runs of the model in one order, the longest as short as can
be. Transfers play no part; what does not fit in memory is rejected.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from anabranch.cluster import GIB
from anabranch.cost import CostModel
from anabranch.errors import InfeasiblePlanError
from anabranch.planner.base import require_options
from anabranch.planner.toolkit.assemble import Candidate
from anabranch.planner.toolkit.infeasible import (
    explain,
    require_sizes,
    runs_on_fewest_devices,
    uses_all_devices,
)
from anabranch.planner.toolkit.parts import Part
from anabranch.planner.toolkit.problem import Problem
from anabranch.plans.slices import profile_covers
from anabranch.plans.stages import StageGraph


@dataclass(frozen=True)
class Even:
    """Contiguous runs of equal work, one per device; replicas where there are fewer operators.

    Attributes:
        max_replicas: replicas per stage at most. None: no limit.
        fewer_stages: propose also rows of fewer stages, with two replicas each, four and so on.
    """

    max_replicas: int | None = None
    fewer_stages: bool = False

    schedules: ClassVar[tuple[str, ...]] = ("gpipe",)

    def __post_init__(self) -> None:
        require_options("even", self, max_replicas=1)

    def __call__(
        self, cost: CostModel, *, batch_size: int, microbatch_size: int | None = None
    ) -> list[StageGraph]:
        """Propose one stage graph per micro-batch size and number of stages; see ``planner.base``.

        Raises:
            InfeasiblePlanError: if none of them fits.
        """
        problem = Problem(cost, batch_size, microbatch_size, self.max_replicas, chained=True)
        require_sizes(problem)
        found = sorted(self._propose(problem), key=lambda even: even.outline_s)
        if not found:
            raise self._explain(problem)
        return [candidate.graph for candidate in found]

    def _propose(self, problem: Problem) -> Iterator[Candidate]:
        cost, order = problem.cost, problem.order
        for size in problem.sizes:
            if not profile_covers(cost, problem.batch_size, size, 1):
                continue
            forward, backward = cost.op_seconds(size)
            seconds = (forward + backward)[list(order)].tolist()
            for replicas in problem.prices(size).degrees if self.fewer_stages else (1,):
                runs = even_runs(seconds, min(problem.devices // replicas, len(order)))
                parts = [Part(sum(1 << op for op in order[i:j]), replicas) for i, j in runs]
                candidate = problem.assembler(problem.prices(size)).assemble(parts)
                if candidate is not None:
                    yield candidate

    @staticmethod
    def _explain(problem: Problem) -> InfeasiblePlanError:
        cluster, name = problem.cost.cluster, problem.cost.graph.name or "the model"
        sizes = [b for b in problem.sizes if problem.prices(b).degrees]
        rows = runs_on_fewest_devices(problem)
        if uses_all_devices(problem, sizes, cluster.memory_bytes, rows):
            return InfeasiblePlanError(
                f"with stages of equal work {name} does not fit the "
                f"{cluster.memory_bytes / GIB:.1f} GiB per device of {cluster.name}, and planner "
                "even tries no others; planners sequential and graphpipe have stages that fit"
            )
        return InfeasiblePlanError(
            f"{name} does not fit {cluster.name} with stages of equal work, nor with other stages "
            f"in a row: {explain(problem)}"
        )


def even_runs(seconds: Sequence[float], count: int) -> list[tuple[int, int]]:
    """Cut a row into ``count`` runs (start, stop), not empty, whose longest is as short as can be.

    Time: O(n^2 * count).
    """
    n = len(seconds)
    sums = [0.0]
    for operator_s in seconds:
        sums.append(sums[-1] + operator_s)
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
