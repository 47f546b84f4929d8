"""Plans from all partitions of a graph, where it has few downsets.

``partitioner.reach`` is fast because it looks at four kinds of stages in a series-parallel graph. A
stage may be more than that (two short pieces from the middles of two branches), and not every graph
is series-parallel (GNMT, where the decoder reads the encoder beside its own embedding). Where the
downsets are few, all partitions can be searched at once instead: ``exact_reach``. The period that
this finds is the least of all, for the prices of ``partitioner.prices``.

When it is used:

- the graph is not series-parallel: if operators that cost nothing are put to their neighbours
  (``exact_atoms``), it has up to ``MOST_DOWNSETS`` downsets, and its layers up to ``MOST_WAYS``
  first stages. PipeDream's GNMT has 35 then, AmoebaNet 54;
- it is series-parallel and has branches, but no more than ``SMALL`` operators.

A downset is an entry in a few tables, so the counts of what lies in series add up; of what lies side
by side they multiply. A model that has too many is planned with some order added (``graph.cuts``).

For every micro-batch size that is not hopeless this gives the front of longest period and depth:
per depth the least period, once with the all-reduce spread over the micro-batches, once without it,
the all-reduce held to about that of the first plan. So of plans with equal periods the shallowest
is a candidate, and all shallower ones that are slower by no more than ``HOPELESS``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property

import numpy as np

from anabranch.cost import CostModel
from anabranch.graph.cuts import decompose, is_series_parallel
from anabranch.planner.partitioner.assemble import Assembler, Candidate
from anabranch.planner.partitioner.exact_atoms import atoms, quotient
from anabranch.planner.partitioner.exact_lattice import Lattice
from anabranch.planner.partitioner.exact_prices import Priced, Weights
from anabranch.planner.partitioner.exact_reach import ExactReach
from anabranch.planner.partitioner.parts import Part, PartPrices
from anabranch.planner.partitioner.prices import Bound, microbatch_sizes
from anabranch.planner.partitioner.search import Problem

MOST_DOWNSETS = 300
MOST_WAYS = 50_000
SMALL = 8

HOPELESS = 1.2
"""No candidate for a micro-batch size or depth whose step cannot be within this factor of the best."""

REDUCE = 1.25
REDUCE_SHARE = 0.03
"""All-reduces may take this many times the longest of the first plan, or this share of a step."""


def is_worthwhile(problem: Problem) -> bool:
    """Whether a graph is one for this search, as far as its structure tells; see above."""
    graph = problem.cost.graph
    if is_series_parallel(decompose(graph)):
        return bool(problem.chain.blocks) and len(graph) <= SMALL
    return True


def exact_candidates(
    problem: Problem,
    microbatch_size: int | None,
    *,
    budget: int = MOST_DOWNSETS,
    known_s: float = float("inf"),
) -> list[Candidate]:
    """Candidates for one micro-batch size or all, in no order; empty if nothing fits.

    Args:
        problem: what is to be planned; its chain is not used.
        microbatch_size: only this size.
        budget: downsets at most.
        known_s: a step that is known to be possible, so that worse sizes can be left out.

    Raises:
        BudgetError: if the model has more downsets than ``budget``, or more than ``MOST_WAYS``
            ways to cut a layer.
    """
    weights = exact_weights(problem.cost, budget=budget)
    sizes = [microbatch_size] if microbatch_size else microbatch_sizes(problem.batch_size)
    searches = [ExactSearch(problem, weights, b) for b in sizes if problem.prices(b).degrees]
    least = known_s
    found: list[Candidate] = []
    for search in sorted(searches, key=lambda each: each.least_step_s):
        for candidate in search.candidates(HOPELESS * least):
            found.append(candidate)
            least = min(least, candidate.step_s)
    return found


def exact_weights(
    cost: CostModel, *, budget: int = MOST_DOWNSETS, ways: int = MOST_WAYS
) -> Weights:
    """All stages of a model.

    Args:
        cost: prices the operators.
        budget: downsets at most.
        ways: first stages of layers at most.

    Raises:
        BudgetError: if there are more.
    """
    groups = atoms(cost)
    lattice = Lattice(quotient(cost.graph, groups), budget=budget, ways=ways)
    return Weights(cost, lattice, groups)


class ExactSearch:
    """One micro-batch size."""

    def __init__(self, problem: Problem, weights: Weights, microbatch_size: int) -> None:
        self._devices = problem.cost.cluster.num_devices
        self._prices = problem.prices(microbatch_size)
        self._priced = Priced.of(weights, self._prices)
        heights = min(self._devices, len(weights.atoms))
        self._reach = ExactReach(weights, self._priced, heights=heights)
        self._parts = PartPrices(self._prices)
        self._assembler = Assembler(
            self._parts, problem.order, problem.max_replicas, problem.chained
        )

    @cached_property
    def least_step_s(self) -> float:
        """No step is shorter: all work shared out evenly, and no less than the longest operator."""
        cost, work, longest = self._prices.cost, float("inf"), float("inf")
        for mode in self._prices.modes:
            seconds = sum(cost.op_seconds(self._prices.samples(mode.replicas), mode.tensor))
            work = min(work, float(np.sum(seconds)) * mode.devices)
            longest = min(longest, float(np.max(seconds)))
        return self._prices.num_microbatches * max(work / self._devices, longest)

    def candidates(self, give_up: float) -> Iterator[Candidate]:
        """Candidates whose step may be shorter than ``give_up`` seconds."""
        if self.least_step_s > give_up:
            return
        seen: set[frozenset[Part]] = set()
        reduce_s = 0.0
        for spread in (True, False):
            bound = Bound(give_up / self._prices.num_microbatches, spread)
            if not spread:
                bound = replace(bound, reduce_s=reduce_s)
            for parts in self.front(bound):
                if frozenset(parts) in seen:
                    continue
                seen.add(frozenset(parts))
                candidate = self._assembler.assemble(parts)
                if candidate is None:
                    continue
                if spread:
                    longest = max(self._parts.reduce_s(part) for part in parts)
                    reduce_s = max(reduce_s, REDUCE * longest, REDUCE_SHARE * candidate.step_s)
                yield candidate

    def front(self, bound: Bound) -> Iterator[list[Part]]:
        """The plans of least period per depth, within a bound: the quickest and deepest first.

        Of equal periods only the shallowest plan.
        """
        periods = self._priced.periods(bound)
        top = self._reach.solve(bound)
        caps = np.flatnonzero(top.devices <= self._devices)
        if not len(caps) or not len(periods):
            return
        # Per cap, the greatest place known to be too small and the least known to do.
        low = np.full(self._reach.heights, -1)
        high = np.full(self._reach.heights, len(periods) - 1)
        found = dict.fromkeys(caps.tolist(), top)
        for cap in reversed(caps.tolist()):
            while high[cap] - low[cap] > 1:
                middle = int(low[cap] + high[cap]) // 2
                answer = self._reach.solve(replace(bound, period_s=float(periods[middle])))
                enough = answer.devices <= self._devices
                low[~enough] = np.maximum(low[~enough], middle)
                for each in np.flatnonzero(enough & (middle < high)).tolist():
                    high[each], found[each] = middle, answer
        for place in sorted(set(high[caps].tolist())):
            cap = int(next(each for each in caps if high[each] == place))
            yield found[cap].parts(cap)
