"""Terms of PipeDream's recurrence at one micro-batch size, and the spans of its plans.

    T^k(u->v, m) = max( A^(k-1)(u->v, m_(k-1)) on micro-batches shared by m times as many,
                        2 (m-1) * w(u->v) / (B_k * R) )
    A^k(u->v, m) = min( T^k(u->v, m),
                        min over s, m' of max( A^k(u->s, m-m'), 2 a_s / B_k, T^k(s->v, m') ) )

with levels k = 1 .. L of m_k components each, bandwidth B_k between the components of level k,
w the bytes of gradients of a span, and 2 a_s the bytes that cross state s with their gradients.

Samples. PipeDream's replicas take whole mini-batches in turn, so it divides a mini-batch's time by
m. Here a stage with d replicas in all, over every level, computes ceil(b / d) samples, priced at
that count, so ``1/m`` is a table for every number r of copies that higher levels make.

All-reduce. In the paper, m replicas process m mini-batches between two all-reduces, so R, the
micro-batches per all-reduce, is r * m. A synchronous step reduces once, R = M. Both are offered.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from anabranch.cluster import Cluster, Level
from anabranch.cost.nested_sets import NestedSets
from anabranch.planner.toolkit.prices import MicrobatchPrices
from anabranch.remembered import remembered

Matrix = NDArray[np.float64]


def tiers(cluster: Cluster) -> tuple[Level, ...]:
    """Return the levels of the recurrence, innermost first, with the slowest bandwidth up to each,
    that of all cards of a component; levels of a single component are left out.
    """
    levels = [
        replace(level, bandwidth=cluster.ring(range(devices)).bandwidth)
        for level, devices in zip(cluster.levels, cluster.group_sizes, strict=True)
    ]
    return tuple(level for level in levels if level.size > 1) or cluster.levels[:1]


def flat(cluster: Cluster) -> tuple[Level, ...]:
    """Return a single level of all devices on the slowest link."""
    count, link = cluster.num_devices, cluster.link(0, cluster.num_devices - 1)
    return (replace(cluster.levels[link.level], size=count, bandwidth=link.bandwidth),)


@dataclass(frozen=True)
class Terms:
    """Terms of the recurrence at one micro-batch size.

    Attributes:
        states: sets of operators that are done, from none to all; a span (u, v) with u inside v is
            the stage that takes the model from state u to state v.
        tiers: the levels, innermost first.
        accumulate: replicas reduce once per step (R = M), not once per r * m micro-batches.
    """

    states: NestedSets
    prices: MicrobatchPrices
    tiers: tuple[Level, ...]
    max_replicas: int
    accumulate: bool

    def allowed(self, replicas: int) -> bool:
        """Return True if a stage may have this number of replicas."""
        return replicas <= self.max_replicas and self.prices.covers_replicas(replicas)

    def possible(self, copies: int) -> bool:
        """Return True if each copy has a sample and stages have few enough replicas."""
        return copies <= min(self.prices.microbatch_size, self.max_replicas)

    def compute_s(self, replicas: int) -> Matrix:
        """Return seconds of every span on these replicas; infinite if not allowed."""
        count = len(self.states)
        if not self.allowed(replicas):
            return np.full((count, count), np.inf)
        done = self.states.compute_s(self.prices.samples(replicas))
        return np.where(self.states.nested, done[None, :] - done[:, None], np.inf)

    def reduce_s(self, level: int, copies: int, m: int) -> Matrix | float:
        """Return seconds per micro-batch of the all-reduce among m components."""
        if m == 1:
            return 0.0
        every = self.prices.num_microbatches if self.accumulate else copies * m
        per_byte_s = 2 * (m - 1) / (self.tiers[level].bandwidth * every)
        return np.asarray(self.states.matrices.held.summed * per_byte_s)

    def cut_s(self, level: int, copies: int) -> NDArray[np.float64]:
        """Return seconds of the transfers across each state, with gradients."""
        per_sample, fixed, back_per_sample, back_fixed = self.states.open_bytes.T
        crossing = (per_sample + back_per_sample) * self.prices.samples(copies) + fixed + back_fixed
        return np.asarray(crossing / self.tiers[level].bandwidth)

    @remembered
    def headroom(self, replicas: int) -> NDArray[np.int32]:
        """Return the most stages that may follow a span in memory; -1 if it cannot fit."""
        height = self.prices.headroom(self.states.matrices, replicas)
        return np.where(self.states.nested, height, -1)

    @property
    def devices(self) -> int:
        """Devices of all levels."""
        return self.component(len(self.tiers) - 1)

    def component(self, level: int) -> int:
        """Return the devices of one component of the next level: all that this level joins."""
        return int(np.prod([tier.size for tier in self.tiers[: level + 1]]))


@dataclass(frozen=True, slots=True)
class PlannedSpan:
    """T^k of a plan: a span on ``copies`` components of the level below.

    Attributes:
        start, stop: states.
        copies: components that each compute a slice of every micro-batch.
        inside: the pipeline in each of them; empty where a component is one device.
    """

    start: int
    stop: int
    copies: int
    inside: tuple[PlannedSpan, ...] = ()


def stages(
    pieces: Sequence[PlannedSpan], sizes: Sequence[int], firsts: Sequence[int] = (0,)
) -> Iterator[tuple[int, int, tuple[int, ...]]]:
    """Generate the stages of a plan in the order of the pipeline.

    Yields:
        First and last state, and devices, which have the same position in every copy.
    """
    component = int(np.prod(sizes[:-1]))
    taken = 0
    for piece in pieces:
        own = [first + (taken + c) * component for first in firsts for c in range(piece.copies)]
        if piece.inside:
            yield from stages(piece.inside, sizes[:-1], own)
        else:
            yield piece.start, piece.stop, tuple(sorted(own))
        taken += piece.copies
