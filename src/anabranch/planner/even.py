"""The simplest pipeline: as many stages as devices, each with about the same work.

As in torchgpipe's ``balance``, stages are contiguous runs of the model in one order that minimise
the longest run. Transfers are ignored; plans that exceed the memory are rejected.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import ClassVar

import numpy as np

from anabranch.cost import CostModel
from anabranch.errors import InfeasiblePlanError
from anabranch.graph.opgraph import bits
from anabranch.planner.base import require_options
from anabranch.planner.toolkit.infeasible import explain, fit_in_a_row
from anabranch.planner.toolkit.prices import Part
from anabranch.planner.toolkit.problem import Problem
from anabranch.plans.plan import memory_text
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
        problem = Problem(
            cost, batch_size, microbatch_size, self.max_replicas, chained=True
        ).checked()
        sizes = [size for size in problem.sizes if problem.prices(size).covers_replicas(1)]
        candidates = [
            problem.assembler(problem.prices(size)).assemble(_parts(problem, size, replicas))
            for size in sizes
            for replicas in (problem.prices(size).degrees if self.fewer_stages else (1,))
        ]
        fitting = sorted(filter(None, candidates), key=lambda candidate: candidate.outline_s)
        if not fitting:
            raise _explained(problem, sizes)
        return [candidate.graph for candidate in fitting]


def _parts(problem: Problem, microbatch_size: int, replicas: int = 1) -> list[Part]:
    order = problem.order
    forward, backward = problem.cost.op_seconds(microbatch_size)
    seconds = (forward + backward)[list(order)].tolist()
    runs = even_runs(seconds, min(problem.devices // replicas, len(order)))
    return [Part(sum(1 << op for op in order[i:j]), replicas) for i, j in runs]


def _explained(problem: Problem, sizes: Sequence[int]) -> InfeasiblePlanError:
    """Return an error with the memory needed at least; it says whether other chains fit."""
    if not sizes:  # the profile covers none for a stage without replicas
        return explain(problem)
    cost, cluster = problem.cost, problem.cost.cluster
    count = -(-problem.batch_size // sizes[0])
    need = max(
        cost.device_bytes(
            bits(part.mask), microbatch_size=sizes[0], replicas=1, in_flight=min(behind + 1, count)
        )
        for behind, part in enumerate(reversed(_parts(problem, sizes[0])))
    )
    if fit_in_a_row(problem, sizes, cluster.memory_bytes):
        others = "planners sequential and graphpipe have stages that fit"
    else:
        others = f"nor does it fit with other stages in a row: {explain(problem)}"
    return InfeasiblePlanError(
        f"with stages of equal work {cost.graph.name or 'the model'} needs {memory_text(need)} on "
        f"a device, of which {cluster.name} has {memory_text(cluster.memory_bytes)}, and planner "
        f"even tries no other stages; {others}"
    )


def even_runs(seconds: Sequence[float], count: int) -> list[tuple[int, int]]:
    """Cut a row into ``count`` non-empty runs (start, stop) that minimise the longest one.

    Time: O(n^2 * count).
    """
    sums = np.array([*accumulate(seconds, initial=0.0)])
    spans = np.where(np.tri(len(sums), dtype=bool), np.inf, sums - sums[:, None])
    # ``longest``: seconds of the longest run so far, by the end of the last one. ``starts``: best
    # start of each further run, by its end; the last one of several that are as good.
    longest, starts = spans[0], []
    for _ in range(count - 1):
        slowest = np.maximum(longest[:, None], spans)
        starts.append(len(sums) - 1 - slowest[::-1].argmin(axis=0))
        longest = slowest.min(axis=0)
    stops = [len(seconds)]
    for chosen in reversed(starts):
        stops.append(int(chosen[stops[-1]]))
    return [*pairwise([0, *reversed(stops)])]
