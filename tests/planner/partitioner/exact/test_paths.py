"""Short ways through a plan, against all cuts of a chain and all partitions of a graph."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.cost import CostModel
from anabranch.planner.partitioner.exact.partition_programme import PartitionProgramme
from anabranch.planner.partitioner.exact.paths import ShortestPath
from anabranch.planner.partitioner.exact.prices import PricedStages
from anabranch.planner.partitions import partitions
from anabranch.planner.toolkit.parts import Part, edges, fits
from anabranch.planner.toolkit.prices import Bound
from tests.planner.helpers import cost_model
from tests.planner.partitioner.exact.test_candidates import exact_of, problem_of
from tests.strategies import planning_profiles

BATCH, SIZE = 8, 2


class Case:
    """A problem with its tables."""

    def __init__(self, cost: CostModel) -> None:
        problem = problem_of(cost, BATCH)
        self.cost = cost
        self.devices = cost.cluster.num_devices
        self.prices = problem.assembler(SIZE).prices
        weights = exact_of(problem).weights
        heights = min(self.devices, len(cost.graph))
        self.priced = PricedStages.of(weights, self.prices.microbatch, heights)
        self.reach = PartitionProgramme(weights, self.priced, heights=heights)
        self._pair = {weights.mask(pair): pair for pair in range(len(weights.lattice.below))}
        self._degrees = [mode.replicas for mode in self.priced.modes]

    def share(self, part: Part) -> float:
        """What a part adds to a way."""
        at = self._degrees.index(part.replicas), self._pair[part.mask]
        return float(self.priced.path_share[at])

    def longest_way(self, parts: Sequence[Part]) -> float:
        """Along the edges between the parts, which come in topological order."""
        longest = [self.share(part) for part in parts]
        for x, y in sorted(edges(self.prices, parts), reverse=True):
            longest[x] = max(longest[x], longest[y] + self.share(parts[x]))
        return max(longest)

    def plans(self) -> Iterator[list[Part]]:
        """All partitions with all numbers of replicas within the devices and memory."""
        for masks, pairs in partitions(self.cost):
            for replicas in product(self._degrees, repeat=len(masks)):
                parts = [Part(mask, d) for mask, d in zip(masks, replicas, strict=True)]
                if sum(replicas) <= self.devices and fits(self.prices, parts, pairs):
                    yield parts


@settings(max_examples=40, deadline=None)
@given(
    planning_profiles(5, series_parallel=False),
    st.integers(1, 4),
    st.sampled_from([3.0, 1e18]),
    st.sampled_from([10**9, 30, 60]),
    st.floats(1.0, 1.6),
)
def test_within_the_bound(profile, devices, bandwidth, memory, looser):
    """A plan that keeps devices, memory and period; no shorter way exists, and none is missed."""
    case = Case(cost_model(profile, devices, bandwidth=bandwidth, memory=memory))
    periods = [max(map(case.prices.period_s, parts)) for parts in case.plans()]
    bound = Bound(min(periods, default=1.0) * looser * (1 + 1e-9))
    path = ShortestPath(case.reach, bound, devices)
    assert path.found == bool(periods)
    if not path.found:
        return
    parts = list(path.parts())
    assert sum(part.mask for part in parts) == (1 << len(case.cost.graph)) - 1
    assert sum(part.devices for part in parts) <= devices
    assert fits(case.prices, parts, ordered_edges(case, parts))
    assert max(map(case.prices.period_s, parts)) == pytest.approx(path.period_s)
    assert path.period_s <= bound.period_s
    within = [p for p in case.plans() if max(map(case.prices.period_s, p)) <= bound.period_s]
    assert min(map(case.longest_way, within)) <= case.longest_way(parts) * (1 + 1e-9)


def ordered_edges(case: Case, parts: Sequence[Part]) -> set[tuple[int, int]]:
    """Edges between the parts; all run from earlier to later ones."""
    pairs = edges(case.prices, parts)
    assert all(x < y for x, y in pairs)
    return pairs


@settings(max_examples=40, deadline=None)
@given(planning_profiles(5), st.integers(1, 4), st.sampled_from([3.0, 1e18]), st.integers(1, 6))
def test_chains_exactly(profile, devices, bandwidth, microbatches):
    """Where each stage follows the one before, a way is a sum, and both kinds are the least."""
    case = Case(cost_model(profile, devices, bandwidth=bandwidth))
    n = len(case.cost.graph)
    if any((a, a + 1) not in case.cost.graph.edges for a in range(n - 1)):
        return
    everything = list(case.plans())
    path = ShortestPath(case.reach, Bound(math.inf), devices)
    ways = [sum(map(case.share, parts)) for parts in everything]
    assert sum(map(case.share, path.parts())) == pytest.approx(min(ways))
    balanced = path.balanced(microbatches)[::-1]
    assert step(case, balanced, microbatches) <= 1.01 * min(
        step(case, parts, microbatches) for parts in everything
    )


def step(case: Case, parts: Sequence[Part], microbatches: int) -> float:
    """Way to the slowest stage and back, and its own work."""
    own = np.array([case.share(part) for part in parts])
    return float((np.cumsum(own) - own + microbatches * own).max())
