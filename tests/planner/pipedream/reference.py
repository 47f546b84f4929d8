"""PipeDream's recurrence written down as it stands, and all plans that it speaks of."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from anabranch.cluster import Cluster, Level
from anabranch.cost import CostModel
from anabranch.cost.nested_sets import NestedSets
from anabranch.graph.opgraph import BATCH, bits
from anabranch.planner.pipedream.terms import PlannedSpan, Terms, tiers
from anabranch.planner.toolkit.prices import MicrobatchPrices
from anabranch.profile.profile import Profile
from tests.planner.helpers import prefixes

INFINITE = math.inf


def nodes(*sizes: int, bandwidths: Sequence[float] = (), memory: int = 10**9) -> Cluster:
    """A cluster with levels of these sizes, innermost first; slow enough that links matter."""
    speeds = bandwidths or [1.0 / (i + 1) for i in range(len(sizes))]
    levels = tuple(
        Level(f"level {i}", size, speed, latency_s=0.0)
        for i, (size, speed) in enumerate(zip(sizes, speeds, strict=True))
    )
    return Cluster("x".join(map(str, sizes)), "cpu", memory, levels)


def terms_for(
    profile: Profile,
    cluster: Cluster,
    *,
    microbatch_size: int,
    batch_size: int,
    accumulate: bool = False,
    states: Sequence[int] | None = None,
    max_replicas: int = 99,
) -> Terms:
    """The terms of the recurrence with the operators in the order of the graph."""
    cost = CostModel(profile, cluster, optimizer_factor=1.0)
    prices = MicrobatchPrices(cost, batch_size, microbatch_size, (), cluster.memory_bytes)
    row = states or prefixes(range(len(profile.graph)))
    return Terms(NestedSets(cost, row), prices, tiers(cluster), max_replicas, accumulate)


@dataclass(frozen=True)
class Reference:
    """The same terms without arrays: every figure from the operators and values of a span."""

    terms: Terms

    def least_s(self) -> float:
        """A^L from the empty state to the whole model on all components."""
        top = len(self.terms.tiers) - 1
        return self.memoised()(top, 1, 0, len(self.terms.states) - 1, self.terms.tiers[top].size)

    def memoised(self):
        """A(level, copies, u, v, m), each worked out once."""

        @cache
        def pipelines(level: int, copies: int, u: int, v: int, m: int) -> float:
            least = stage(level, copies, u, v, m)
            for s in self.between(u, v):
                for n in range(1, m):
                    before = pipelines(level, copies, u, s, m - n)
                    after = stage(level, copies, s, v, n)
                    least = min(least, max(before, self.cut_s(level, copies, s), after))
            return least

        @cache
        def stage(level: int, copies: int, u: int, v: int, m: int) -> float:
            if level:
                size = self.terms.tiers[level - 1].size
                inside = pipelines(level - 1, copies * m, u, v, size)
            else:
                inside = self.compute_s(copies * m, u, v)
            return max(inside, self.reduce_s(level, copies, u, v, m))

        return pipelines

    def between(self, u: int, v: int) -> Iterator[int]:
        """States inside a span."""
        masks = self.terms.states.sets
        for s in range(u + 1, v):
            if masks[u] & ~masks[s] == 0 and masks[s] & ~masks[v] == 0:
                yield s

    def ops(self, u: int, v: int) -> list[int]:
        """Operators of a span."""
        masks = self.terms.states.sets
        return list(bits(masks[v] & ~masks[u]))

    def compute_s(self, replicas: int, u: int, v: int) -> float:
        """Forward and backward of a span on so many replicas."""
        cost, size = self.terms.prices.cost, self.terms.prices.microbatch_size
        samples = -(-size // replicas)
        if replicas > min(size, self.terms.max_replicas) or not cost.covers(samples):
            return INFINITE
        return sum(cost.stage_s(sum(1 << op for op in self.ops(u, v)), samples))

    def reduce_s(self, level: int, copies: int, u: int, v: int, m: int) -> float:
        """2 (m - 1) w / (B R), R micro-batches per all-reduce."""
        prices = self.terms.prices
        every = prices.num_microbatches if self.terms.accumulate else copies * m
        weights = prices.cost.stage_parameter_bytes(self.ops(u, v)).trainable
        return 2 * (m - 1) * weights / (self.terms.tiers[level].bandwidth * every)

    def cut_s(self, level: int, copies: int, s: int) -> float:
        """What crosses a state and its gradients."""
        graph, done = self.terms.prices.cost.graph, self.terms.states.sets[s]
        samples = -(-self.terms.prices.microbatch_size // copies)
        total = 0.0
        for value in graph.values:
            made = value.producer != BATCH and done >> value.producer & 1
            if made and any(not done >> consumer & 1 for consumer in value.consumers):
                total += value.size(samples) * (2 if value.grad else 1)
        return total / self.terms.tiers[level].bandwidth

    def period_s(
        self, pieces: Sequence[PlannedSpan], level: int | None = None, copies: int = 1
    ) -> float:
        """The value of the recurrence for one plan."""
        level = len(self.terms.tiers) - 1 if level is None else level
        longest = max((self.cut_s(level, copies, piece.start) for piece in pieces[1:]), default=0)
        for piece in pieces:
            u, v, m = piece.start, piece.stop, piece.copies
            inside = self.compute_s(copies * m, u, v)
            if level:
                inside = self.period_s(piece.inside, level - 1, copies * m)
            longest = max(longest, inside, self.reduce_s(level, copies, u, v, m))
        return longest

    def plans(self) -> Iterator[tuple[PlannedSpan, ...]]:
        """Every plan on all components."""
        top = len(self.terms.tiers) - 1
        last = len(self.terms.states) - 1
        yield from self._plans(top, 0, last, self.terms.tiers[top].size)

    def _plans(self, level: int, u: int, v: int, m: int) -> Iterator[tuple[PlannedSpan, ...]]:
        for whole in self._pieces(level, u, v, m):
            yield (whole,)
        for s in self.between(u, v):
            for n in range(1, m):
                for last in self._pieces(level, s, v, n):
                    for before in self._plans(level, u, s, m - n):
                        yield (*before, last)

    def _pieces(self, level: int, u: int, v: int, m: int) -> Iterator[PlannedSpan]:
        if not level:
            yield PlannedSpan(u, v, m)
            return
        for inside in self._plans(level - 1, u, v, self.terms.tiers[level - 1].size):
            yield PlannedSpan(u, v, m, inside)
