"""Fewest devices for a model, if no stage may take longer than a bound.

For one bound on the period the states of a chain are (cut j, height h of the stage that ends
there); the value is the fewest devices for everything before the cut::

    devices[h, j]  =  min over i < j of  need[h, j, i] + devices[h + 1, i]

Height is the distance to the sink in stages: a stage at height h keeps at least h + 1
micro-batches, so memory depends on it, and what comes before a stage lies one higher. For several
caps u on the height everything is done at once, which gives the least depth for a number of
devices. Arrays are [cap u, height h, cut j].

A block adds to its chain, in front of it the least devices of what came before it:

- boundaries at both sides: every branch is a chain of its own; the devices add up and the height
  is the largest. Runs of whole branches (in the order of the block) may form one stage;
- a stage after the block that also takes the last operators of some branches (``Sharing`` over
  their cuts);
- a stage before the block that also takes the first operators of some branches, likewise. To save
  time no more than ``HEADS`` cuts per branch are tried, and such a block has a boundary on its
  other side.

How high the branches reach couples them to what comes before. So branches are solved for the caps
at which that gets dearer: one cap if memory does not depend on the height, and for a block that
nothing precedes.

Time per bound: O(n^2 H) for a chain of n items, O(m D^2) for a block of m branches on D devices,
in NumPy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np

from anabranch.planner.partitioner.chains import Block, Chain
from anabranch.planner.partitioner.prices import Bound, Prices
from anabranch.planner.partitioner.ranges import INFINITE, Bools, Floats, Ints, Ranges, Shares
from anabranch.planner.partitioner.sharing import Options, Sharing, whole, worthwhile
from anabranch.planner.partitioner.solved import Between, Fork, Found, Join, Solved

HEADS = 8
"""Cuts per branch that a stage before a block may take, besides none and all of it."""

FEW = 8
"""Up to so many heights are looked at one by one."""

_NONE = np.empty((0, 1), dtype=np.int32)


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
        return Found(self.chain, self.prices.degrees, solved)

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

    def _solve(self, chain: Chain, caps: Ints, start: int = 0) -> Solved:
        heights, n = self.heights, len(chain.items)
        need = self._need(chain)
        devices = np.full((len(caps), heights + 1, n + 1), INFINITE, dtype=np.int32)
        devices[..., start] = np.where(np.arange(heights + 1) <= caps[:, None] + 1, 0, INFINITE)
        solved = Solved(caps, start, devices, need)
        for i, j in _stretches(chain, start):
            self._extend(chain, solved, i, j + 1)
            item = chain.items[j - 1]
            if isinstance(item, Block):
                solved.between[j - 1] = self._pass(chain, item, j - 1, solved)
        return solved

    def _extend(self, chain: Chain, solved: Solved, i: int, j: int) -> None:
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

    def _pass(self, chain: Chain, block: Block, p: int, solved: Solved) -> Between:
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
        between = Between(caps, branches, groups, useful, alone, totals)
        _improve(solved.devices[:, :exits, p + 1], before[:, caps + 1], between.whole[-1])
        if p > solved.start:
            self._forks(chain, block, p, solved, between, exits)
        if p + 1 < len(chain.items):
            self._joins(chain, block, p, solved, between, exits)
        return between

    def _joins(
        self, chain: Chain, block: Block, p: int, solved: Solved, between: Between, exits: int
    ) -> None:
        """Stages that begin in the block's branches and end at a later cut of the chain."""
        stops = self._while_short(chain, [(p + 1, q) for q in range(p + 2, len(chain.items) + 1)])
        if not stops:
            return
        devices = {k: each.devices[:, :exits] for k, each in between.branches.items()}
        same = _alike(list(devices.values()), between.groups, between.caps)
        # The stage lies one lower than what it leaves of the branches.
        held = self.prices.in_flight(same.last - 1)
        options = {}
        for k, branch in between.branches.items():
            tails = self.ranges(block.branches[k]).tails
            some = branch.devices[:, same.last]
            options[k] = self._options(some, tails, tails.memory(held)[None])
        sharing = self._share(block, between, between.caps, same, options, between.worthwhile)
        needs, degree, total = self._fewest(sharing, chain, stops, held[None, :])
        needs, degree, total = (each[..., same.place] for each in (needs, degree, total))
        needs[..., 0] = INFINITE  # no height is left for the stage itself
        between.join = Join(sharing, same.place, p + 2, needs, degree, total)
        before = solved.devices[:, between.caps + 1, p]
        for q, need in enumerate(needs, start=p + 2):
            _improve(solved.devices[:, : exits - 1, q], before, need[:, 1:])

    def _forks(
        self, chain: Chain, block: Block, p: int, solved: Solved, between: Between, exits: int
    ) -> None:
        """Stages that begin at an earlier cut of the chain and end in the block's branches."""
        starts = self._while_short(chain, [(i, p) for i in reversed(range(solved.start, p))])
        # A stage at height u + 1 is followed by branches of at most height u.
        caps = _steps(np.concatenate([solved.devices[:, 2:, i] for i, _ in starts] or [_NONE]))
        if not len(caps):
            return
        held = self.prices.in_flight(caps + 1)
        cuts = {k: self._head_cuts(block.branches[k]) for k in between.branches}
        suffixes = {(k, c): self._solve(block.branches[k], caps, c) for k in cuts for c in cuts[k]}
        devices = {
            k: np.stack([suffixes[k, c].devices[:, :exits, -1] for c in cuts[k]], axis=-1)
            for k in cuts
        }
        same = _alike(list(devices.values()), between.groups, caps)
        options = {}
        for k in cuts:
            heads = self.ranges(block.branches[k]).heads.take(cuts[k])
            some = devices[k][:, same.last]
            options[k] = self._options(some, heads, heads.memory(held)[:, None])
        alone = [suffixes[k, 0].devices[:, :exits, -1] for k in block.classes]
        useful = worthwhile(alone, between.groups)
        sharing = self._share(block, between, caps, same, options, useful)
        needs, degree, total = self._fewest(sharing, chain, starts, held[:, None])
        needs, degree, total = (each[..., same.place] for each in (needs, degree, total))
        between.fork = Fork(sharing, same.place, caps, needs, degree, total, suffixes, cuts)
        for (i, _), need in zip(starts, needs, strict=True):
            before = solved.devices[:, caps + 2, i]
            _improve(solved.devices[:, :exits, p + 1], before, need)

    def _while_short(self, chain: Chain, runs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """The first of these ever longer ranges, as long as some degree is quick enough."""
        compute = self.ranges(chain).compute_s.min(axis=0)
        return list(takewhile(lambda run: compute[run] <= self._bound.period_s, runs))

    def _options(self, devices: Ints, shares: Shares, memory: Floats) -> Options:
        spread = shares.reduce_s * self._spread
        compute, traffic = shares.compute_s + spread, shares.traffic_s + spread
        return Options(devices, compute, traffic, shares.reduce_s, memory)

    def _share(
        self,
        block: Block,
        between: Between,
        caps: Ints,
        same: Alike,
        options: dict[int, Options],
        useful: Bools,
    ) -> Sharing:
        # More than what all branches need on their own or in groups helps nobody.
        most = sum(_largest(options[k].devices) for k in block.classes)
        most += _largest(between.groups[useful]) * (len(block.classes) // 2)
        return Sharing(
            [options[k] for k in block.classes],
            between.groups[..., same.last],
            useful,
            same.last <= caps[:, None],
            min(self.limit, most),
        )

    @staticmethod
    def _head_cuts(branch: Chain) -> list[int]:
        """Cuts to try, from all of the branch to nothing of it."""
        n = len(branch.items)
        inner = (
            range(1, n) if n <= HEADS + 1 else {n * i // (HEADS + 1) for i in range(1, HEADS + 1)}
        )
        return [n, *sorted(inner, reverse=True), 0]

    def _fewest(
        self, sharing: Sharing, chain: Chain, runs: Sequence[tuple[int, int]], held: Ints
    ) -> tuple[Ints, Ints, Ints]:
        """The best shares to go with each of some ranges.

        Returns:
            Fewest devices, and for these the place of the stage's degree and the devices outside
            the stage: [range, u, e].
        """
        ranges, bound = self.ranges(chain), self._bound
        at = (slice(None), *np.array(runs).T)
        reduce_s = ranges.reduce_s[at].T[:, None, None]
        spread = reduce_s * self._spread
        compute = ranges.compute_s[at].T[:, None, None] + spread
        traffic = ranges.traffic_s[at].T[:, None, None] + spread
        memory = ranges.fixed[at].T[:, None, None] + (
            held[..., None] * ranges.per_microbatch[at].T[:, None, None]
        )
        fits: Bools = sharing.sums[0] + compute[..., None] <= bound.period_s
        fits &= sharing.sums[1] + traffic[..., None] <= bound.period_s
        fits &= sharing.sums[2] + reduce_s[..., None] <= bound.reduce_s
        fits &= sharing.sums[3] + memory[..., None] <= self.prices.memory_bytes
        total = fits.argmax(axis=-1).astype(np.int32)
        degrees = np.array(self.prices.degrees, dtype=np.int32)
        needs = np.where(fits.any(axis=-1), total + degrees, INFINITE).astype(np.int32)
        k = needs.argmin(axis=-1).astype(np.int32)
        best = k[..., None]
        return (
            np.take_along_axis(needs, best, axis=-1)[..., 0],
            k,
            np.take_along_axis(total, best, axis=-1)[..., 0],
        )


@dataclass(frozen=True)
class Alike:
    """Heights at which all that a block needs is the same.

    Attributes:
        last: the largest height of each class.
        place: the class of each height.
    """

    last: Ints
    place: Ints


def _alike(devices: Sequence[Ints], groups: Ints, caps: Ints) -> Alike:
    """Classes of heights: [e] of tables [u, e, c].

    Memory still rises with the height, and is taken at the last of a class. So that this loses
    little, a class ends where the height doubles, and up to ``FEW`` heights are never joined.
    """
    exits = groups.shape[-1]
    if exits <= FEW:
        return Alike(np.arange(exits, dtype=np.int32), np.arange(exits, dtype=np.int32))
    keys: dict[tuple[int, bytes], int] = {}
    place = np.empty(exits, dtype=np.int32)
    last: list[int] = []
    for e in range(exits):
        table = b"".join(each[:, e].tobytes() for each in devices)
        allowed = (e <= caps).tobytes()
        key = e.bit_length(), table + groups[..., e].tobytes() + allowed
        place[e] = keys.setdefault(key, len(keys))
        last[place[e] :] = [e]
    return Alike(np.array(last, dtype=np.int32), place)


def _largest(devices: Ints) -> int:
    """The most that is not infinite."""
    finite = devices[devices < INFINITE]
    return int(finite.max()) if finite.size else 0


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
