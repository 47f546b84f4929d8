"""Fewest devices for a model, if no stage may take longer than a bound.

For one bound on the period the states of a chain are (cut j, height h of the stage that ends
there); the value is the fewest devices for everything before the cut::

    devices[h, j]  =  min over i < j of  need[h, j, i] + devices[h + 1, i]

Height is the distance to the sink in stages: a stage at height h keeps at least h + 1 micro-
batches, so memory depends on it, and what comes before a stage lies one higher. For several caps
u on the height everything is done at once, which gives the least depth for a number of devices.
Arrays are [cap u, height h, cut j].

A block adds to its chain, in front of it the least devices of what came before it:

- boundaries at both sides: every branch is a chain of its own; the devices add up and the height
is the largest. Runs of
  whole branches (in the order of the block) may form one stage.
- a stage after the block that also takes the last operators of some branches (``Sharing`` over
their cuts); - a stage before the block that also takes the first operators of some branches,
likewise. To save time no more than
  ``HEADS`` cuts per branch are tried, and such a block has a boundary on its other side.

How high the branches reach couples them to what comes before. So branches are solved for the caps
at which that gets dearer: one cap if memory does not depend on the height, and for a block that
nothing precedes.

Time per bound: O(n^2 H) for a chain of n items, O(m D^2) for a block of m branches on D devices,
in NumPy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from anabranch.planner.chains import Block, Chain
from anabranch.planner.parts import Part
from anabranch.planner.prices import Bound, Prices
from anabranch.planner.ranges import INFINITE, Bools, Floats, Ints, Ranges, Shares
from anabranch.planner.sharing import Options, Sharing, Taken, whole, worthwhile

HEADS = 8
"""Cuts per branch that a stage before a block may take, besides none and all of it."""


@dataclass
class _Join:
    """A stage from a block's branches up to cut ``stop`` of the chain that holds the block."""

    sharing: Sharing
    needs: Ints  # [u, e]: fewest devices, those of the stage included
    degree: Ints  # [u, e]
    total: Ints  # [u, e]: devices of the branches' remainders


@dataclass
class _Fork:
    """A stage from cut ``start`` of the chain that holds the block into the block's branches."""

    sharing: Sharing
    caps: Ints
    needs: Ints  # [u, e]
    degree: Ints
    total: Ints
    suffixes: dict[tuple[int, int], _Solved]  # (class, cut) -> the branch from there on
    cuts: dict[int, list[int]]  # class -> cut of each option


@dataclass
class _Between:
    """A block in its chain."""

    caps: Ints
    branches: dict[int, _Solved]  # class -> solved on its own
    groups: Ints
    worthwhile: Bools
    alone: list[Ints]
    whole: list[Ints]
    joins: dict[int, _Join] = field(default_factory=dict)
    forks: dict[int, _Fork] = field(default_factory=dict)


@dataclass
class _Solved:
    """One chain, from one cut on, for several caps."""

    caps: Ints
    start: int
    devices: Ints
    need: Ints
    between: dict[int, _Between] = field(default_factory=dict)


class Reach:
    """Solves one model at one micro-batch size for any bound.

    Args:
        chain: the whole model.
        prices: periods and memory.
        limit: most devices.
        heights: number of heights; no plan has more stages on a path.
    """

    def __init__(self, chain: Chain, prices: Prices, *, limit: int, heights: int) -> None:
        self.chain = chain
        self.prices = prices
        self.limit = limit
        self.heights = heights
        self._ranges: dict[int, Ranges] = {}
        self._bound = Bound(np.inf)
        self._needs: dict[int, Ints] = {}

    def solve(self, bound: Bound, caps: Sequence[int]) -> Found:
        """Fewest devices within a bound, for several caps on the height."""
        self._bound = bound
        self._needs = {}
        solved = self._solve(self.chain, np.array(caps, dtype=np.int32))
        return Found(self, solved)

    def ranges(self, chain: Chain | Block) -> Ranges:
        """Prices of the ranges of a chain, or of the groups of a block."""
        key = id(chain)
        if key not in self._ranges:
            self._ranges[key] = Ranges(chain.row, self.prices)
        return self._ranges[key]

    @property
    def _spread(self) -> float:
        """What part of an all-reduce counts for each micro-batch."""
        return 1 / self.prices.num_microbatches if self._bound.spread else 0.0

    def _need(self, chain: Chain | Block) -> Ints:
        if id(chain) not in self._needs:
            self._needs[id(chain)] = self.ranges(chain).need(self._bound, self.heights)
        return self._needs[id(chain)]

    def _solve(self, chain: Chain, caps: Ints, start: int = 0) -> _Solved:
        heights, n = self.heights, len(chain.items)
        need = self._need(chain)
        devices = np.full((len(caps), heights + 1, n + 1), INFINITE, dtype=np.int32)
        devices[..., start] = np.where(np.arange(heights + 1) <= caps[:, None] + 1, 0, INFINITE)
        solved = _Solved(caps, start, devices, need)
        for i, j in _stretches(chain, start):
            self._extend(chain, solved, i, j + 1)
            item = chain.items[j - 1]
            if isinstance(item, Block):
                solved.between[j - 1] = self._pass(chain, item, j - 1, solved)
        return solved

    def _extend(self, chain: Chain, solved: _Solved, i: int, j: int) -> None:
        """Stages that end at the cuts i .. j - 1, when all cuts before i are done."""
        devices, need, start = solved.devices, solved.need, solved.start
        reached = min(self.heights, chain.below[i] + 1)
        if j - i <= reached:
            for cut in range(i, j):
                stage = need[:reached, cut, start:cut]
                best = (devices[:, 1 : reached + 1, start:cut] + stage).min(axis=-1)
                now = devices[:, :reached, cut]
                np.minimum(now, best, out=now)
            return
        for h in reversed(range(reached)):
            stage = need[min(h, len(need) - 1), i:j, start:j]
            best = (devices[:, h + 1, None, start:j] + stage).min(axis=-1)
            now = devices[:, h, i:j]
            np.minimum(now, best, out=now)

    def _pass(self, chain: Chain, block: Block, p: int, solved: _Solved) -> _Between:
        """Add to ``solved`` what leads through the block at position p."""
        exits = min(self.heights, chain.below[p + 1] + 1)
        before = solved.devices[..., p]
        caps = _steps(before[:, 1:])
        firsts = sorted(set(block.classes))
        branches = {k: self._solve(block.branches[k], caps) for k in firsts}
        ends = {k: each.devices[:, :exits, -1] for k, each in branches.items()}
        groups = _spread(self._need(block), exits)
        alone = [ends[k] for k in block.classes]
        useful = worthwhile(alone, groups)
        totals = whole(alone, groups, useful, caps)
        between = _Between(caps, branches, groups, useful, alone, totals)
        _improve(solved.devices[:, :exits, p + 1], before[:, caps + 1], between.whole[-1])
        if p > solved.start:
            self._forks(chain, block, p, solved, between, exits)
        if p + 1 < len(chain.items):
            self._joins(chain, block, p, solved, between, exits)
        return between

    def _joins(
        self, chain: Chain, block: Block, p: int, solved: _Solved, between: _Between, exits: int
    ) -> None:
        """Stages that begin in the block's branches and end at a later cut of the chain."""
        ranges = self.ranges(chain)
        last = len(chain.items)
        if not (ranges.compute_s[:, p + 1, p + 2] <= self._bound.period_s).any():
            return
        # The stage lies one lower than what it leaves of the branches.
        held = self.prices.in_flight(np.arange(exits) - 1)
        options = {
            k: self._tail_options(block.branches[k], solved_branch, held, exits)
            for k, solved_branch in between.branches.items()
        }
        sharing = Sharing(
            [options[k] for k in block.classes],
            between.groups,
            between.worthwhile,
            between.caps,
            self.limit,
        )
        before = solved.devices[:, between.caps + 1, p]
        for q in range(p + 2, last + 1):
            fits = self._fits(sharing, ranges, p + 1, q, held[None, :])
            if fits is None:
                break
            join = _Join(sharing, *self._fewest(fits))
            join.needs[:, 0] = INFINITE  # no height is left for the stage itself
            between.joins[q] = join
            _improve(solved.devices[:, : exits - 1, q], before, join.needs[:, 1:])

    def _tail_options(self, branch: Chain, solved: _Solved, held: Ints, exits: int) -> Options:
        tails = self.ranges(branch).tails
        devices = solved.devices[:, :exits]
        return self._options(devices, tails, tails.memory(held)[None])

    def _options(self, devices: Ints, shares: Shares, memory: Floats) -> Options:
        spread = shares.reduce_s * self._spread
        compute, traffic = shares.compute_s + spread, shares.traffic_s + spread
        return Options(devices, compute, traffic, shares.reduce_s, memory)

    def _forks(
        self, chain: Chain, block: Block, p: int, solved: _Solved, between: _Between, exits: int
    ) -> None:
        """Stages that begin at an earlier cut of the chain and end in the block's branches."""
        ranges = self.ranges(chain)
        if not (ranges.compute_s[:, p - 1, p] <= self._bound.period_s).any():
            return
        # A stage at height u + 1 is followed by branches of at most height u.
        caps = _steps(
            np.concatenate([solved.devices[..., i] for i in range(solved.start, p)])[:, 2:]
        )
        if not len(caps):
            return
        held = self.prices.in_flight(caps + 1)
        cuts = {k: self._head_cuts(block.branches[k]) for k in between.branches}
        suffixes = {(k, c): self._solve(block.branches[k], caps, c) for k in cuts for c in cuts[k]}
        options = {}
        for k in cuts:
            devices = np.stack([suffixes[k, c].devices[:, :exits, -1] for c in cuts[k]], axis=-1)
            taken = self.ranges(block.branches[k]).heads.take(cuts[k])
            memory = taken.memory(held)[:, None]
            options[k] = self._options(devices, taken, memory)
        sharing = Sharing(
            [options[k] for k in block.classes],
            between.groups,
            between.worthwhile,
            caps,
            self.limit,
        )
        for i in reversed(range(solved.start, p)):
            fits = self._fits(sharing, ranges, i, p, held[:, None])
            if fits is None:
                break
            fork = _Fork(sharing, caps, *self._fewest(fits), suffixes, cuts)
            between.forks[i] = fork
            before = solved.devices[:, caps + 2, i]
            _improve(solved.devices[:, :exits, p + 1], before, fork.needs)

    @staticmethod
    def _head_cuts(branch: Chain) -> list[int]:
        """Cuts to try, from all of the branch to nothing of it."""
        n = len(branch.items)
        inner = (
            range(1, n) if n <= HEADS + 1 else {n * i // (HEADS + 1) for i in range(1, HEADS + 1)}
        )
        return [n, *sorted(inner, reverse=True), 0]

    def _fits(
        self, sharing: Sharing, ranges: Ranges, start: int, stop: int, held: Ints
    ) -> Bools | None:
        """Which shares go with a range: [u, e, k, v]; None if no longer range can fit either."""
        bound = self._bound
        reduce_s = ranges.reduce_s[:, start, stop]
        compute = ranges.compute_s[:, start, stop] + reduce_s * self._spread
        if not (compute <= bound.period_s).any():
            return None
        traffic = ranges.traffic_s[:, start, stop] + reduce_s * self._spread
        memory = ranges.fixed[:, start, stop]
        memory = memory + held[..., None] * ranges.per_microbatch[:, start, stop]
        fits: Bools = sharing.sums[0] + compute[:, None] <= bound.period_s
        fits &= sharing.sums[1] + traffic[:, None] <= bound.period_s
        fits &= sharing.sums[2] + reduce_s[:, None] <= bound.reduce_s
        fits &= sharing.sums[3] + memory[..., None] <= self.prices.memory_bytes
        return fits

    def _fewest(self, fits: Bools) -> tuple[Ints, Ints, Ints]:
        """Fewest devices, and for them the degree's place and the devices outside the stage."""
        total = fits.argmax(axis=-1).astype(np.int32)
        degrees = np.array(self.prices.degrees, dtype=np.int32)
        needs = np.where(fits.any(axis=-1), total + degrees, INFINITE)
        k = needs.argmin(axis=-1).astype(np.int32)
        at = k[..., None]
        return (
            np.take_along_axis(needs, at, axis=-1)[..., 0].astype(np.int32),
            k,
            np.take_along_axis(total, at, axis=-1)[..., 0],
        )


def _stretches(chain: Chain, start: int) -> Iterator[tuple[int, int]]:
    """Runs i .. j of the cuts after ``start``; each but the last ends behind a block."""
    i = start + 1
    for j in range(start + 1, len(chain.items) + 1):
        if j == len(chain.items) or isinstance(chain.items[j - 1], Block):
            yield i, j
            i = j + 1


def _steps(before: Ints) -> Ints:
    """Heights u after which what comes before gets dearer; ``before`` is [t, u]."""
    following = np.concatenate(
        [before[:, 1:], np.full((len(before), 1), 2 * INFINITE, dtype=before.dtype)], axis=1
    )
    dearer = (before < INFINITE) & (before < following)
    return np.flatnonzero(dearer.any(axis=0)).astype(np.int32)


def _spread(need: Ints, exits: int) -> Ints:
    """A table of groups as [stop, start, height], for the first ``exits`` heights."""
    some = need[:exits].transpose(1, 2, 0)
    return np.broadcast_to(some, (*some.shape[:2], exits))


def _improve(devices: Ints, before: Ints, within: Ints) -> None:
    """Lower ``devices`` [t, e] to the least over u of ``before`` [t, u] + ``within`` [u, e]."""
    if before.shape[1]:
        total = (before[:, :, None] + within[None]).min(axis=1)
        np.minimum(devices, total, out=devices)


class Found:
    """The answer for one bound: fewest devices per cap, and the stages behind them.

    Attributes:
        devices: per cap.
    """

    def __init__(self, reach: Reach, solved: _Solved) -> None:
        self._reach = reach
        self._solved = solved
        self.devices = solved.devices[:, 0, -1]

    def parts(self, u: int) -> list[Part]:
        """The stages for one cap, in no particular order."""
        return list(self._walk(self._reach.chain, self._solved, u, len(self._reach.chain.items), 0))

    def _walk(self, chain: Chain, solved: _Solved, u: int, j: int, h: int) -> Iterator[Part]:
        """Stages of the chain from where it was solved to cut j, the last of them at height h."""
        while j > solved.start:
            stage = self._last_stage(solved, u, j, h)
            if stage is not None:
                i, replicas = stage
                yield Part(chain.row.mask(i, j), replicas)
                j, h = i, h + 1
                continue
            j, h, parts = self._through_block(chain, solved, u, j, h)
            yield from parts

    @staticmethod
    def _last_stage(solved: _Solved, u: int, j: int, h: int) -> tuple[int, int] | None:
        start = solved.start
        column = solved.need[min(h, len(solved.need) - 1), j, start:j]
        goal = solved.devices[u, h, j]
        found = np.flatnonzero(column + solved.devices[u, h + 1, start:j] == goal)
        return (start + int(found[0]), int(column[found[0]])) if len(found) else None

    def _through_block(
        self, chain: Chain, solved: _Solved, u: int, j: int, h: int
    ) -> tuple[int, int, list[Part]]:
        """The cut and height before the block that leads to cut j, and the stages in between."""
        goal = int(solved.devices[u, h, j])
        for p, between in solved.between.items():
            before = solved.devices[u, :, p]
            if p + 1 == j:
                for w, cap in enumerate(between.caps):
                    if before[cap + 1] + between.whole[-1][w, h] == goal:
                        return p, int(cap) + 1, list(self._branches(chain, p, between, w, h))
                for i, fork in between.forks.items():
                    for w, cap in enumerate(fork.caps):
                        if solved.devices[u, cap + 2, i] + fork.needs[w, h] == goal:
                            parts = list(self._fork(chain, p, i, between, fork, w, h))
                            return i, int(cap) + 2, parts
            if j in between.joins:
                join = between.joins[j]
                for w, cap in enumerate(between.caps):
                    if (
                        h + 1 < join.needs.shape[1]
                        and before[cap + 1] + join.needs[w, h + 1] == goal
                    ):
                        parts = list(self._join(chain, p, j, between, join, w, h + 1))
                        return p, int(cap) + 1, parts
        raise AssertionError("every entry of the table was made by a stage or a block")

    def _branches(self, chain: Chain, p: int, between: _Between, w: int, e: int) -> Iterator[Part]:
        block = chain.items[p]
        assert isinstance(block, Block)
        j = len(block.branches)
        while j:
            if between.whole[j][w, e] == between.whole[j - 1][w, e] + between.alone[j - 1][w, e]:
                j -= 1
                yield from self._branch(block, between.branches, j, w, None, e)
                continue
            i = next(
                i
                for i in range(j - 1)
                if between.whole[i][w, e] + between.groups[j, i, e] == between.whole[j][w, e]
            )
            yield Part(block.row.mask(i, j), int(between.groups[j, i, e]))
            j = i

    def _branch(
        self,
        block: Block,
        solved: dict[int, _Solved],
        j: int,
        w: int,
        cut: int | None,
        e: int,
    ) -> Iterator[Part]:
        branch = block.branches[j]
        stop = len(branch.items) if cut is None else cut
        yield from self._walk(branch, solved[block.classes[j]], w, stop, e)

    def _join(
        self, chain: Chain, p: int, q: int, between: _Between, join: _Join, w: int, e: int
    ) -> Iterator[Part]:
        block = chain.items[p]
        assert isinstance(block, Block)
        k = int(join.degree[w, e])
        taken = join.sharing.taken(w, e, k, int(join.total[w, e]))
        mask = chain.row.mask(p + 1, q)
        for j, cut in enumerate(taken.options):
            if cut >= 0:
                branch = block.branches[j]
                mask |= branch.row.mask(cut, len(branch.items))
                yield from self._branch(block, between.branches, j, w, cut, e)
        yield Part(mask, self._reach.prices.degrees[k])
        yield from self._groups(block, between, taken, e)

    def _fork(
        self, chain: Chain, p: int, i: int, between: _Between, fork: _Fork, w: int, e: int
    ) -> Iterator[Part]:
        block = chain.items[p]
        assert isinstance(block, Block)
        k = int(fork.degree[w, e])
        taken = fork.sharing.taken(w, e, k, int(fork.total[w, e]))
        mask = chain.row.mask(i, p)
        for j, option in enumerate(taken.options):
            if option >= 0:
                branch = block.branches[j]
                cut = fork.cuts[block.classes[j]][option]
                mask |= branch.row.mask(0, cut)
                solved = fork.suffixes[block.classes[j], cut]
                yield from self._walk(branch, solved, w, len(branch.items), e)
        yield Part(mask, self._reach.prices.degrees[k])
        yield from self._groups(block, between, taken, e)

    @staticmethod
    def _groups(block: Block, between: _Between, taken: Taken, e: int) -> Iterator[Part]:
        for i, j in taken.groups:
            yield Part(block.row.mask(i, j), int(between.groups[j, i, e]))
