"""Exhaustive search over the partitions of a small model: the oracle for other planners.

All partitions of up to ``MOST_OPERATORS`` operators into stages with an acyclic stage graph
(4,140 partitions of 8 operators before that condition), and every micro-batch size. For each,

- by default, the numbers of replicas that give the least longest period on all devices and within
  their memory (``planner.toolkit.assemble``);
- with ``every``, all numbers of replicas that add up to the devices: 1 + 3 + 3 + 1 ways for 4
  devices and 1 to 4 stages. The best of these, simulated, is the best plan there is on one level of
  links. On several, devices are given out in the ways of ``toolkit.place`` only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from anabranch.cost import CostModel
from anabranch.errors import BudgetError
from anabranch.planner.base import require_options
from anabranch.planner.toolkit.assemble import Candidate
from anabranch.planner.toolkit.infeasible import explain
from anabranch.planner.toolkit.prices import MicrobatchPrices, Part
from anabranch.planner.toolkit.problem import Problem
from anabranch.plans.partitions import partitions
from anabranch.plans.stages import StageGraph, heights

MOST_OPERATORS, MOST_DEVICES = 8, 64
"""Largest model and cluster; 8 operators have 4,140 partitions."""

MOST_STAGE_GRAPHS = 100_000
"""Most stage graphs with ``every``, which take about a minute and a half."""

_Partitions = Sequence[tuple[tuple[int, ...], set[tuple[int, int]]]]


@dataclass(frozen=True)
class Exhaustive:
    """Tries every partition.

    Attributes:
        max_replicas: replicas per stage at most. None: no limit.
        candidates: stage graphs to propose at most. None: no limit.
        every: try all numbers of replicas, not only those with the least longest period.
        recompute: each stage may recompute.
    """

    max_replicas: int | None = None
    candidates: int | None = 24
    every: bool = False
    recompute: bool = False

    schedules: ClassVar[tuple[str, ...]] = ("1f1b", "1f1b-deep")

    def __post_init__(self) -> None:
        require_options("exhaustive", self, max_replicas=1, candidates=1)

    def __call__(
        self, cost: CostModel, *, batch_size: int, microbatch_size: int | None = None
    ) -> Iterator[StageGraph]:
        """Propose stage graphs: some as they are found, then the quickest in outline first.

        See ``planner.base``.

        Raises:
            BudgetError: if the model or the cluster is too large.
            InfeasiblePlanError: if nothing fits.
        """
        total = cost.cluster.num_devices
        if len(cost.graph) > MOST_OPERATORS or total > MOST_DEVICES:
            raise BudgetError(
                f"planner exhaustive takes up to {MOST_OPERATORS} operators and {MOST_DEVICES} "
                f"devices; {cost.graph.name or 'the model'} has {len(cost.graph)} operators and "
                f"{cost.cluster.name} {total} devices: capture coarser operators (blocks), or use "
                "planner graphpipe"
            )
        problem = Problem(
            cost, batch_size, microbatch_size, self.max_replicas, recompute=self.recompute
        ).checked()
        everything = list(partitions(cost))
        if self.every:
            self._require_few(cost, everything, len(problem.sizes))
        return self._propose(problem, everything)

    def _propose(self, problem: Problem, everything: _Partitions) -> Iterator[StageGraph]:
        candidates: list[Candidate] = []
        least_s = math.inf
        for size in problem.sizes:
            for candidate in self._at_size(problem, size, everything):
                candidates.append(candidate)
                if candidate.outline_s < least_s:
                    least_s = candidate.outline_s
                    yield candidate.graph
        if not candidates:
            raise explain(problem)
        candidates.sort(key=lambda candidate: candidate.outline_s)
        yield from list(dict.fromkeys(best.graph for best in candidates))[: self.candidates]

    def _require_few(self, cost: CostModel, everything: _Partitions, sizes: int) -> None:
        total = cost.cluster.num_devices
        modes = 1 + self.recompute
        count = sizes * sum(
            math.comb(total - 1, len(masks) - 1) * modes ** len(masks) for masks, _ in everything
        )
        if count > MOST_STAGE_GRAPHS:
            raise BudgetError(
                f"every partition of {cost.graph.name or 'the model'} with every number of "
                f"replicas on {total} devices would be up to {count:,} stage graphs, more than "
                f"the {MOST_STAGE_GRAPHS:,} that planner exhaustive tries; give a micro-batch "
                "size, take fewer devices or coarser operators, or leave out the option every"
            )

    def _at_size(self, problem: Problem, size: int, everything: _Partitions) -> Iterator[Candidate]:
        """Generate the candidates of one micro-batch size."""
        assembler = problem.assembler(problem.prices(size))
        degrees = assembler.prices.degrees
        if not degrees:
            return
        for masks, pairs in everything:
            chosen: Iterable[list[Part]] = [[Part(mask, degrees[0]) for mask in masks]]
            if self.every:
                stages = list(zip(masks, heights(len(masks), pairs), strict=True))
                limits = problem.devices, problem.most_replicas
                chosen = _assignments(assembler.prices, stages, *limits)
            for parts in chosen:
                yield from assembler.assemblies(parts)


def _assignments(
    prices: MicrobatchPrices, stages: Sequence[tuple[int, int]], devices: int, limit: int
) -> Iterator[list[Part]]:
    """Generate all ways to give exactly ``devices`` devices to stages, (mask, height), that fit."""
    if not stages:
        if devices == 0:
            yield []
        return
    (mask, height), rest = stages[0], stages[1:]
    for part in prices.parts(mask, min(devices - len(rest), limit)):
        # Nothing is gained by recomputation where there is memory for a deep warm-up without.
        roomy = part.recompute and (
            prices.part_headroom(replace(part, recompute=False)) >= 2 * height
        )
        if prices.part_headroom(part) >= height and not roomy:
            for others in _assignments(prices, rest, devices - part.replicas, limit):
                yield [part, *others]
