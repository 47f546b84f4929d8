"""Plans from all partitions of a graph, where it has few downsets or can be made to have few.

``partitioner.chain_programme`` knows four kinds of stages of a series-parallel graph. Where the
downsets are few, ``exact.partition_programme`` finds the least period of all partitions, for the
prices of ``toolkit.prices``. This is done for

- a series-parallel graph with few downsets or operators; ``partitioner.period_search`` searches it
  too;
- any other graph (GNMT, NASNet). Operators that cost nothing go to their neighbours
  (``exact.contraction``), which leaves PipeDream's GNMT with 35 downsets and Piper's with 75. Where
  more than ``EXACT.most_downsets`` are left, neighbours become one until there are at most
  ``EXACT.per_device`` per device. ``period_search`` joins in only if the heaviest group computes
  for more than falls to each device: with order added (``graph.series_parallel``) it takes longer
  and finds less. NASNet on 32 devices: 2 s and a step of 222 ms, against 12 s and 289 ms.

The downsets of parts in series add up, those of parts side by side multiply.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from anabranch.cost import CostModel
from anabranch.errors import BudgetError
from anabranch.graph.opgraph import bits
from anabranch.graph.series_parallel import is_series_parallel
from anabranch.planner.partitioner.chains import Chain
from anabranch.planner.partitioner.exact.contraction import atoms, merged, quotient
from anabranch.planner.partitioner.exact.lattice import Lattice
from anabranch.planner.partitioner.exact.prices import LatticeWeights
from anabranch.planner.partitioner.exact.size_candidates import SizeCandidates
from anabranch.planner.partitioner.limits import EXACT
from anabranch.planner.partitioner.period_search import candidates
from anabranch.planner.toolkit.assemble import Candidate
from anabranch.planner.toolkit.problem import Problem


def with_exact(
    problem: Problem, chain: Chain, microbatch_size: int | None, *, known_s: float = float("inf")
) -> Iterator[Candidate]:
    """Candidates of this search where it suits the problem, and of ``partitioner.period_search``.

    Args:
        known_s: a step that is known to be possible, so that worse sizes can be left out.
    """
    exact = AllPartitions.of(problem)
    found = False
    if exact is not None:
        for candidate in exact.candidates(microbatch_size, known_s=known_s):
            found, known_s = True, min(known_s, candidate.step_s)
            yield candidate
    if exact is None or not (exact.alone and found):
        yield from candidates(problem, chain, microbatch_size, known_s=known_s)


@dataclass(frozen=True)
class AllPartitions:
    """All partitions of a problem's graph, or of a coarser one.

    Attributes:
        alone: nothing is gained by ``partitioner.period_search``.
    """

    problem: Problem
    weights: LatticeWeights
    alone: bool

    @staticmethod
    def of(problem: Problem) -> AllPartitions | None:
        """The search for a problem that is one for it; None for others, in a millisecond."""
        graph = problem.cost.graph
        if not is_series_parallel(problem.tree):
            return _of_any(problem)
        groups = tuple(1 << i for i in range(len(graph)))
        budget = EXACT.downsets if len(graph) > EXACT.operators else EXACT.most_downsets
        lattice = _lattice(problem.cost, groups, budget)
        if lattice is None:
            return None
        return AllPartitions(problem, LatticeWeights(problem.cost, lattice, groups), alone=False)

    def candidates(
        self, microbatch_size: int | None, *, known_s: float = float("inf")
    ) -> Iterator[Candidate]:
        """Candidates for one micro-batch size or all, in no order; none if nothing fits."""
        problem = self.problem
        sizes = (b for b in problem.sizes(microbatch_size) if problem.prices(b).degrees)
        searches = [SizeCandidates(problem, self.weights, size) for size in sizes]
        searches.sort(key=lambda search: search.least_step_s)
        least = known_s
        best: list[tuple[float, int]] = []
        for at, search in enumerate(searches):
            candidate = search.likeliest(EXACT.hopeless * least)
            if candidate is not None:
                least = min(least, candidate.step_s)
                best.append((candidate.step_s, at))
                yield candidate
        few = len(self.weights.lattice.below) <= EXACT.thorough
        for _, at in sorted(best)[: None if few else EXACT.refined]:
            for candidate in searches[at].candidates(EXACT.hopeless * least):
                least = min(least, candidate.step_s)
                yield candidate


def _of_any(problem: Problem) -> AllPartitions:
    cost = problem.cost
    groups = _atoms(cost)
    lattice = _lattice(cost, groups, EXACT.most_downsets)
    if lattice is not None:
        return AllPartitions(problem, LatticeWeights(cost, lattice, groups), alone=True)
    budget = max(
        EXACT.merged, min(EXACT.most_downsets, EXACT.per_device * cost.cluster.num_devices)
    )
    fewer = merged(cost, groups, lambda some: _lattice(cost, some, budget) is not None)
    lattice = _lattice(cost, fewer, budget)
    assert lattice is not None, "merging ends where there are few downsets"
    return AllPartitions(
        problem, LatticeWeights(cost, lattice, fewer), alone=_is_fine(cost, groups, fewer)
    )


def _atoms(cost: CostModel) -> tuple[int, ...]:
    if len(cost.graph) <= EXACT.contracted:
        return atoms(cost)
    return tuple(1 << i for i in range(len(cost.graph)))


def _lattice(cost: CostModel, groups: tuple[int, ...], budget: int) -> Lattice | None:
    if len(groups) >= budget:
        return None
    try:
        lattice = Lattice(quotient(cost.graph, groups), budget=budget, ways=EXACT.ways)
        return lattice if lattice.splits is not None else None
    except BudgetError:
        return None


def _is_fine(cost: CostModel, before: tuple[int, ...], after: tuple[int, ...]) -> bool:
    """Whether what was put to the heaviest of each group takes little of a device's time."""
    forward, backward = cost.op_seconds(cost.profile.samples[0])
    seconds = forward + backward
    weight = {mask: float(seconds[list(bits(mask))].sum()) for mask in before}
    home = {op: mask for mask in before for op in bits(mask)}
    added = 0.0
    for group in after:
        members = [weight[mask] for mask in {home[op] for op in bits(group)}]
        added = max(added, sum(members) - max(members))
    return added <= float(seconds.sum()) / cost.cluster.num_devices
