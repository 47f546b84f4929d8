"""Fewest devices for a model if no stage may take longer than a bound; for many bounds at once.

For one bound on the period the states of a chain are (cut j, height h of the stage that ends
there); the value is the fewest devices for everything before the cut::

    devices[h, j]  =  min over i < j of  need[h, j, i] + devices[h + 1, i]

Height is the distance to the sink in stages: a stage at height h keeps at least h + 1
micro-batches, and what comes before it lies one higher. The last height may stand for all greater
ones; with one height only, every stage is at the sink, which gives a lower limit quickly. Several
caps u on the height give the least depth for a number of devices. Arrays are [bound t, cap u,
height h, cut j]; bounds may belong to different micro-batch sizes.

A block adds to its chain, in front of it the least devices of what came before it:

- boundaries at both sides: every branch is a chain of its own; the devices add up and the height
  is the largest. Runs of whole branches (in the order of the block) may form one stage;
- a stage after the block that also takes the last operators of some branches (``BlockNeighbour``);
- a stage before the block that also takes the first operators of some branches: at most
  ``SEARCH.heads`` cuts per branch, and such a block has a boundary on its other side.

The height of the branches couples them to what comes before, so they are solved for the caps at
which that gets dearer: one if memory does not depend on the height or nothing precedes the block.

Time per bound: O(n^2 H) for a chain of n items, O(m D A) for a block of m branches on D devices
whose remainders need one of A amounts of them, in NumPy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import takewhile

import numpy as np

from anabranch.planner.partitioner.block_stage import BlockNeighbour, Limits, SharedStages, Stages
from anabranch.planner.partitioner.branch_shares import largest_groups, whole
from anabranch.planner.partitioner.chains import Block, Chain, count, span
from anabranch.planner.partitioner.limits import SEARCH
from anabranch.planner.partitioner.programme_tables import (
    BlockTables,
    ChainSolution,
    ChainTables,
    Fork,
    Join,
)
from anabranch.planner.partitioner.range_prices import (
    INFINITE,
    Bools,
    Ints,
    RangePrices,
    RangeSizes,
)
from anabranch.planner.toolkit.infeasible import Fewest
from anabranch.planner.toolkit.parts import Part
from anabranch.planner.toolkit.prices import Bound, MicrobatchPrices


class ChainProgramme:
    """Solves one model at some micro-batch sizes for any bounds.

    Attributes:
        heights: number of heights; no plan has more stages on a path.
        heads: cuts per branch that a stage before a block may take, besides none and all of it.
    """

    def __init__(self, chain: Chain, prices: Sequence[MicrobatchPrices], *, limit: int) -> None:
        self.chain = chain
        self.sizes = RangeSizes(prices)
        self.limit = limit
        self.heights = min(limit, span(chain))
        self.heads = SEARCH.heads if count(chain) <= SEARCH.items else SEARCH.heads_in_large
        self._ranges: dict[int, RangePrices] = {}

    def ranges(self, chain: Chain | Block) -> RangePrices:
        """Prices of the ranges of a chain, or of the groups of a block."""
        key = id(chain)
        if key not in self._ranges:
            self._ranges[key] = RangePrices(chain.row, self.sizes)
        return self._ranges[key]

    def lightly(self, bounds: Sequence[Bound]) -> ChainSolution:
        """Fewest devices as if every stage were at the sink: a lower limit. Else as ``solve``."""
        return self._run(bounds, [0], heights=1, most=0, beyond=True)

    def solve(self, bounds: Sequence[Bound], caps: Sequence[int] | None = None) -> ChainSolution:
        """Fewest devices within bounds (all spread, or none) for caps on the height, ascending."""
        if caps is not None:
            heights = max(caps) + 1
            return self._run(bounds, caps, heights=heights, most=heights - 1, beyond=False)
        # More than all micro-batches are never in flight.
        most = min(self.heights, max(int(self.sizes.count[bound.at]) for bound in bounds)) - 1
        heights = min(most + 1, SEARCH.most_heights)
        return self._run(bounds, [heights - 1], heights=heights, most=most, beyond=True)

    def _run(
        self, bounds: Sequence[Bound], caps: Sequence[int], *, heights: int, most: int, beyond: bool
    ) -> ChainSolution:
        run = _Run(self, bounds, heights, most, beyond)
        solved = run.solve(self.chain, np.array(caps, dtype=np.int32))
        return ChainSolution(self.chain, self.ranges, run.limits.bounds, heights, most, solved)


class _Run:
    """All tables for some bounds.

    Args:
        most: the height for which the last of them stands where memory is concerned.
        beyond: the last height stands for all greater ones too.
    """

    def __init__(
        self, reach: ChainProgramme, bounds: Sequence[Bound], heights: int, most: int, beyond: bool
    ) -> None:
        self.limits = Limits(reach.sizes, bounds)
        self._reach = reach
        self._heights = heights
        self._most = most
        self._beyond = beyond
        self._needs: dict[int, Ints] = {}
        self._solved: dict[tuple[int, int, bytes], ChainTables] = {}
        self._shared: dict[tuple[int, int, bytes], SharedStages] = {}

    def _need(self, chain: Chain | Block) -> Ints:
        if id(chain) not in self._needs:
            ranges = self._reach.ranges(chain)
            need = ranges.need(self.limits.bounds, self._heights, self._most)
            self._needs[id(chain)] = need
        return self._needs[id(chain)]

    def solve(self, chain: Chain, caps: Ints, start: int = 0) -> ChainTables:
        """The tables of a chain from one cut on."""
        key = id(chain), start, caps.tobytes()
        if key not in self._solved:
            self._solved[key] = self._solve(chain, caps, start)
        return self._solved[key]

    def _solve(self, chain: Chain, caps: Ints, start: int) -> ChainTables:
        heights, n = self._heights, len(chain.items)
        need = self._need(chain)
        shape = len(self.limits.bounds), len(caps), heights + 1, n + 1
        devices = np.full(shape, INFINITE, dtype=np.int32)
        devices[..., start] = np.where(np.arange(heights + 1) <= caps[:, None] + 1, 0, INFINITE)
        solved = ChainTables(caps, start, devices, need)
        for i, j in _stretches(chain, start):
            self._extend(chain, solved, i, j + 1)
            item = chain.items[j - 1]
            if isinstance(item, Block):
                self._pass(chain, item, j - 1, solved)
        return solved

    def _close(self, devices: Ints, reached: int) -> None:
        """Complete cuts [t, u, h, j] where the last height also stands for what is beyond it."""
        if self._beyond and reached == self._heights:
            devices[:, :, reached] = devices[:, :, reached - 1]

    def _extend(self, chain: Chain, solved: ChainTables, i: int, j: int) -> None:
        """Stages that end at the cuts i .. j - 1, when all cuts before i are done."""
        devices, need, start = solved.devices, solved.need, solved.start
        reached = min(self._heights, chain.below[i] + 1)
        if j - i <= reached or self._beyond:
            for cut in range(i, j):
                stage = need[:, None, :reached, cut, start:cut]
                best = (devices[:, :, 1 : reached + 1, start:cut] + stage).min(axis=-1)
                now = devices[:, :, :reached, cut]
                np.minimum(now, best, out=now)
                self._close(devices[..., cut : cut + 1], reached)
            return
        for h in reversed(range(reached)):
            stage = need[:, None, min(h, need.shape[1] - 1), i:j, start:j]
            best = (devices[:, :, h + 1, None, start:j] + stage).min(axis=-1)
            now = devices[:, :, h, i:j]
            np.minimum(now, best, out=now)

    def _pass(self, chain: Chain, block: Block, p: int, solved: ChainTables) -> None:
        """Add to ``solved`` what leads through the block at position p."""
        exits = min(self._heights, chain.below[p + 1] + 1)
        before = solved.devices[..., p]
        caps = _steps(before[..., 1:])
        if not len(caps):
            return
        branches = {k: self.solve(block.branches[k], caps) for k in sorted(set(block.classes))}
        alone = {k: branch.devices[:, :, :exits, -1] for k, branch in branches.items()}
        groups = _by_group(self._need(block), exits)
        totals = self._whole([alone[k] for k in block.classes], groups, caps)
        between = BlockTables(caps, branches, groups, alone, totals)
        solved.between[p] = between
        _improve(solved.devices[:, :, :exits, p + 1], before[..., caps + 1], totals[-1])
        if p > solved.start:
            self._forks(chain, block, p, solved, between)
        self._close(solved.devices[..., p + 1 : p + 2], exits)
        if p + 1 < len(chain.items):
            self._joins(chain, block, p, solved, between)

    @staticmethod
    def _whole(alone: Sequence[Ints], groups: Ints, caps: Ints) -> Ints:
        """Fewest devices for the first j branches, no stage leaving the block: [j, t, u, e]."""
        shape = alone[0].shape
        flat = [table.reshape(shape[0], -1) for table in alone]
        allowed = np.arange(shape[2]) <= caps[:, None]
        some = np.repeat(groups[..., None, :], len(caps), axis=-2).reshape(*groups.shape[:3], -1)
        return whole(flat, largest_groups(flat, some, allowed.reshape(-1))).reshape(-1, *shape)

    def _joins(
        self, chain: Chain, block: Block, p: int, solved: ChainTables, between: BlockTables
    ) -> None:
        """Stages that begin in the block's branches and end at a later cut of the chain."""
        exits = between.groups.shape[-1]
        # A stage at height h leaves what is one higher to the branches.
        above = np.arange(1, exits + 1)
        above = np.minimum(above, exits - 1) if self._last(exits) else above[:-1]
        stops = self._while_short(chain, [(p + 1, q) for q in range(p + 2, len(chain.items) + 1)])
        if not stops or not len(above):
            return
        key = id(block), 1, between.caps.tobytes()
        if key not in self._shared:
            beside = BlockNeighbour(
                block,
                {k: branch.devices[:, :, above] for k, branch in between.branches.items()},
                {k: self._reach.ranges(block.branches[k]).tails for k in between.branches},
                between.groups[..., above],
                above <= between.caps[:, None],
                self._held(np.broadcast_to(np.arange(len(above)), (len(between.caps), len(above)))),
            )
            self._shared[key] = self._share(beside, chain, stops)
        shared = self._shared[key]
        between.join = Join(shared, p + 2)
        before = solved.devices[..., p][..., between.caps + 1]
        for q, need in enumerate(shared.needs, start=p + 2):
            _improve(solved.devices[:, :, : len(above), q], before, need)
        self._close(solved.devices[..., p + 2 : p + 2 + len(stops)], len(above))

    def _share(
        self, beside: BlockNeighbour, chain: Chain, runs: Sequence[tuple[int, int]]
    ) -> SharedStages:
        stages = Stages.of(self._reach.ranges(chain), runs, self.limits)
        return beside.share(stages, self.limits, self._reach.limit)

    def _last(self, reached: int) -> bool:
        """Whether so many heights include one that stands for all greater ones."""
        return self._beyond and reached == self._heights

    def _forks(
        self, chain: Chain, block: Block, p: int, solved: ChainTables, between: BlockTables
    ) -> None:
        """Stages that begin at an earlier cut of the chain and end in the block's branches."""
        starts = self._while_short(chain, [(i, p) for i in reversed(range(p))])
        count = min(len(starts), p - solved.start)
        # A stage at height u + 1 is followed by branches of at most height u.
        above = np.arange(2, self._heights + 1 + self._beyond).clip(max=self._heights)
        if not count or not len(above):
            return
        before = np.stack([solved.devices[:, :, above, i] for i, _ in starts[:count]])
        caps = _steps(before)
        if not len(caps):
            return
        cuts = {k: _head_cuts(block.branches[k], self._reach.heads) for k in between.branches}
        suffixes = {(k, c): self.solve(block.branches[k], caps, c) for k in cuts for c in cuts[k]}
        key = id(block), 0, caps.tobytes()
        if key not in self._shared:
            exits = between.groups.shape[-1]
            height = self._held(np.minimum(caps + 1, self._heights - 1))
            ends = {at: suffix.devices[:, :, :exits, -1] for at, suffix in suffixes.items()}
            beside = BlockNeighbour(
                block,
                {k: np.stack([ends[k, c] for c in cuts[k]], axis=-1) for k in cuts},
                {k: self._reach.ranges(block.branches[k]).heads.take(cuts[k]) for k in cuts},
                between.groups,
                np.arange(exits) <= caps[:, None],
                np.broadcast_to(height[:, None], (len(caps), exits)),
            )
            self._shared[key] = self._share(beside, chain, starts)
        shared = self._shared[key]
        between.fork = Fork(shared, count, above[caps], suffixes, cuts)
        for devices, need in zip(before, shared.needs, strict=False):
            exits = need.shape[-1]
            _improve(solved.devices[:, :, :exits, p + 1], devices[..., caps], need)

    def _held(self, heights: Ints) -> Ints:
        """Heights as far as memory is concerned."""
        return np.where(heights == self._heights - 1, self._most, heights)

    def _while_short(self, chain: Chain, runs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """The first of these ever longer ranges, as long as some mode is quick enough."""
        if not runs:
            return []
        start, stop = np.array(runs).T
        sizes = self.limits.sizes
        compute = self._reach.ranges(chain).compute_s((start, stop))
        least = np.where(sizes.valid[..., None], compute, np.inf).min(axis=1)
        short: Bools = (least[self.limits.at] <= self.limits.period_s[:, None]).any(axis=0)
        return [run for run, _ in takewhile(lambda entry: entry[1], zip(runs, short, strict=True))]


def on_fewest_devices(chain: Chain) -> Fewest:
    """The stages of a model that need the fewest devices, however slow they are."""

    def fewest(prices: MicrobatchPrices) -> list[Part]:
        limit = prices.max_devices
        found = ChainProgramme(chain, [prices], limit=limit).solve([Bound(float("inf"))])
        return found.parts(0) if found.devices[0, 0] <= limit else []

    return fewest


def _head_cuts(branch: Chain, heads: int) -> list[int]:
    """Cuts to try, from all of the branch to nothing of it."""
    n = len(branch.items)
    inner = range(1, n) if n <= heads + 1 else {n * i // (heads + 1) for i in range(1, heads + 1)}
    return [n, *sorted(inner, reverse=True), 0]


def _stretches(chain: Chain, start: int) -> Iterator[tuple[int, int]]:
    """Runs i .. j of the cuts after ``start``; each but the last ends behind a block."""
    i = start + 1
    for j in range(start + 1, len(chain.items) + 1):
        if j == len(chain.items) or isinstance(chain.items[j - 1], Block):
            yield i, j
            i = j + 1


def _steps(before: Ints) -> Ints:
    """Heights u after which what comes before gets dearer; ``before`` is [..., u]."""
    flat = before.reshape(-1, before.shape[-1])
    following = np.concatenate(
        [flat[:, 1:], np.full((len(flat), 1), 2 * INFINITE, dtype=flat.dtype)], axis=1
    )
    dearer = (flat < INFINITE) & (flat < following)
    return np.flatnonzero(dearer.any(axis=0)).astype(np.int32)


def _by_group(need: Ints, exits: int) -> Ints:
    """A table of groups [t, h, stop, start] as [stop, start, t, e], for the first heights."""
    some = need[:, :exits].transpose(2, 3, 0, 1)
    return np.broadcast_to(some, (*some.shape[:3], exits))


def _improve(devices: Ints, before: Ints, within: Ints) -> None:
    """Lower ``devices`` [t, u, e] to the least of ``before`` [t, u, w] + ``within`` [t, w, e]."""
    if before.shape[2] == 1:
        total = before + within
    else:
        total = (before[..., None] + within[:, None]).min(axis=2)
    np.minimum(devices, total, out=devices)
