"""Tables that some bounds leave behind, and the stages that can be read from them.

Arrays are [bound t, cap u, height h, cut j]. The last height, one more than stages may have, is
where what comes before the highest stage begins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from anabranch.planner.partitioner.block_stage import SharedStages
from anabranch.planner.partitioner.branch_shares import Taken
from anabranch.planner.partitioner.chains import Block, Chain
from anabranch.planner.partitioner.range_prices import Ints, RangePrices
from anabranch.planner.toolkit.parts import Part
from anabranch.planner.toolkit.prices import Bound


@dataclass
class Join:
    """A stage from a block's branches up to a cut of the chain that holds the block.

    Attributes:
        shared: what it may take of the branches, for each cut from the first on.
    """

    shared: SharedStages
    first: int


@dataclass
class Fork:
    """A stage from a cut of the chain that holds a block into the block's branches.

    Attributes:
        shared: what it may take of the branches, for each cut from the block backwards; heights are
            those of what follows the block.
        before: height of what comes before the stage: [w].
        suffixes: (class, cut) -> the branch from there on.
        cuts: class -> cut of each option.
    """

    shared: SharedStages
    count: int
    before: Ints
    suffixes: dict[tuple[int, int], ChainTables]
    cuts: dict[int, list[int]]


@dataclass
class BlockTables:
    """A block in its chain.

    Attributes:
        caps: heights at which what comes before the block gets dearer: [w].
        branches: class -> the branch, solved on its own.
        groups: fewest devices for branches i .. j - 1 as one stage: [j, i, t, e].
        alone: class -> what such a branch needs on its own: [t, w, e].
        whole: what the first j branches need: [j, t, w, e].
    """

    caps: Ints
    branches: dict[int, ChainTables]
    groups: Ints
    alone: dict[int, Ints]
    whole: Ints
    join: Join | None = None
    fork: Fork | None = None


@dataclass
class ChainTables:
    """One chain, from one cut on, for several caps.

    Attributes:
        caps: largest heights: [u].
        devices: fewest for what lies between it and cut j, if the stage after that has height
            h - 1: [t, u, h, j].
        need: fewest devices for a stage: [t, h, j, i].
        between: position -> the block there.
    """

    caps: Ints
    start: int
    devices: Ints
    need: Ints
    between: dict[int, BlockTables] = field(default_factory=dict)


class ChainSolution:
    """The answer for some bounds: fewest devices per bound and cap, and the stages behind them.

    Args:
        ranges: prices of the ranges of a chain or block.
        most: the height for which the last of them stands where memory is concerned.

    Attributes:
        devices: fewest per bound and cap: [t, u].
    """

    def __init__(
        self,
        chain: Chain,
        ranges: Callable[[Chain | Block], RangePrices],
        bounds: Sequence[Bound],
        heights: int,
        most: int,
        solved: ChainTables,
    ) -> None:
        self.bounds = bounds
        self.devices = solved.devices[:, :, 0, -1]
        self._chain = chain
        self._ranges = ranges
        self._heights = heights
        self._most = most
        self._solved = solved

    def parts(self, t: int, u: int = 0) -> list[Part]:
        """The stages for one bound and cap, in no particular order."""
        reader = _Reader(self._ranges, self.bounds[t], t, self._heights, self._most)
        return list(reader.walk(self._chain, self._solved, u, len(self._chain.items), 0))


@dataclass(frozen=True)
class _Reader:
    """Reads the stages for one bound, the last ones first."""

    ranges: Callable[[Chain | Block], RangePrices]
    bound: Bound
    t: int
    heights: int
    most: int

    def walk(self, chain: Chain, solved: ChainTables, u: int, j: int, h: int) -> Iterator[Part]:
        """Stages of the chain from where it was solved to cut j, the last of them at height h."""
        while j > solved.start:
            stage = self._last_stage(solved, u, j, h)
            if stage is not None:
                i, devices = stage
                yield self._part(chain, i, j, h, devices)
                j, h = i, self._above(h)
                continue
            j, h, parts = self._through_block(chain, solved, u, j, h)
            yield from parts

    def _above(self, h: int) -> int:
        return min(h + 1, self.heights)

    def _part(self, within: Chain | Block, i: int, j: int, h: int, devices: int) -> Part:
        height = h if h < self.heights - 1 else self.most
        mode = self.ranges(within).mode(self.bound, i, j, height, devices)
        return Part(within.row.mask(i, j), mode.replicas, mode.recompute, mode.tensor)

    def _last_stage(self, solved: ChainTables, u: int, j: int, h: int) -> tuple[int, int] | None:
        start, devices = solved.start, solved.devices[self.t, u]
        column = solved.need[self.t, min(h, solved.need.shape[1] - 1), j, start:j]
        found = np.flatnonzero(column + devices[self._above(h), start:j] == devices[h, j])
        return (start + int(found[0]), int(column[found[0]])) if len(found) else None

    def _through_block(
        self, chain: Chain, solved: ChainTables, u: int, j: int, h: int
    ) -> tuple[int, int, list[Part]]:
        """The cut and height before the block that leads to cut j, and the stages in between."""
        for p, between in solved.between.items():
            way = None
            if p + 1 == j:
                way = self._plainly(chain, solved, p, between, (u, h))
                way = way or self._from_fork(chain, solved, p, between, (u, h))
            elif between.join is not None and j >= between.join.first:
                way = self._into_join(chain, solved, p, between, (u, h, j))
            if way is not None:
                return way
        raise AssertionError("every entry of the table was made by a stage or a block")

    def _plainly(
        self, chain: Chain, solved: ChainTables, p: int, between: BlockTables, goal: tuple[int, int]
    ) -> tuple[int, int, list[Part]] | None:
        u, h = goal
        e = min(h, between.whole.shape[-1] - 1)
        devices = solved.devices[self.t, u]
        for w, cap in enumerate(between.caps):
            if devices[cap + 1, p] + between.whole[-1, self.t, w, e] == devices[h, p + 1]:
                return p, int(cap) + 1, list(self._branches(chain, p, between, w, e))
        return None

    def _from_fork(
        self, chain: Chain, solved: ChainTables, p: int, between: BlockTables, goal: tuple[int, int]
    ) -> tuple[int, int, list[Part]] | None:
        u, h = goal
        fork = between.fork
        if fork is None:
            return None
        e = min(h, fork.shared.needs.shape[-1] - 1)
        devices = solved.devices[self.t, u]
        for back in range(min(fork.count, len(fork.shared.needs))):
            for w, before in enumerate(fork.before):
                needed = devices[before, p - 1 - back] + fork.shared.needs[back, self.t, w, e]
                if needed == devices[h, p + 1]:
                    parts = list(self._fork(chain, p, between, fork, (back, w, e)))
                    return p - 1 - back, int(before), parts
        return None

    def _into_join(
        self,
        chain: Chain,
        solved: ChainTables,
        p: int,
        between: BlockTables,
        goal: tuple[int, int, int],
    ) -> tuple[int, int, list[Part]] | None:
        u, h, j = goal
        join = between.join
        assert join is not None
        after = j - join.first
        h = min(h, self.heights - 1)
        needs = join.shared.needs
        if after >= len(needs) or h >= needs.shape[-1]:
            return None
        devices = solved.devices[self.t, u]
        for w, cap in enumerate(between.caps):
            if devices[cap + 1, p] + needs[after, self.t, w, h] == devices[h, j]:
                parts = list(self._join(chain, p, between, join, (after, w, h)))
                return p, int(cap) + 1, parts
        return None

    def _branches(
        self, chain: Chain, p: int, between: BlockTables, w: int, e: int
    ) -> Iterator[Part]:
        block = chain.items[p]
        assert isinstance(block, Block)
        whole = between.whole[:, self.t, w, e]
        j = len(block.branches)
        while j:
            k = block.classes[j - 1]
            if whole[j] == whole[j - 1] + between.alone[k][self.t, w, e]:
                j -= 1
                branch = block.branches[j]
                yield from self.walk(branch, between.branches[k], w, len(branch.items), e)
                continue
            i = next(
                i for i in range(j - 1) if whole[i] + self._group(between, i, j, e) == whole[j]
            )
            yield self._part(block, i, j, e, self._group(between, i, j, e))
            j = i

    def _group(self, between: BlockTables, i: int, j: int, e: int) -> int:
        return int(between.groups[j, i, self.t, e])

    def _join(
        self, chain: Chain, p: int, between: BlockTables, join: Join, at: tuple[int, int, int]
    ) -> Iterator[Part]:
        block = chain.items[p]
        assert isinstance(block, Block)
        after, w, h = at
        # What is left of the branches lies one higher.
        e = min(h + 1, between.groups.shape[-1] - 1)
        k = int(join.shared.mode[after, self.t, w, h])
        total = int(join.shared.total[after, self.t, w, h])
        taken = join.shared.sharing.taken(self.t, int(join.shared.place[w, h]), k, total)
        mask = chain.row.mask(p + 1, join.first + after)
        for j, cut in enumerate(taken.options):
            if cut >= 0:
                branch = block.branches[j]
                mask |= branch.row.mask(cut, len(branch.items))
                yield from self.walk(branch, between.branches[block.classes[j]], w, cut, e)
        yield self._shared(chain, mask, k)
        yield from self._groups(block, between, taken, e)

    def _fork(
        self, chain: Chain, p: int, between: BlockTables, fork: Fork, at: tuple[int, int, int]
    ) -> Iterator[Part]:
        block = chain.items[p]
        assert isinstance(block, Block)
        back, w, e = at
        k = int(fork.shared.mode[back, self.t, w, e])
        total = int(fork.shared.total[back, self.t, w, e])
        taken = fork.shared.sharing.taken(self.t, int(fork.shared.place[w, e]), k, total)
        mask = chain.row.mask(p - 1 - back, p)
        for j, option in enumerate(taken.options):
            if option >= 0:
                branch = block.branches[j]
                cut = fork.cuts[block.classes[j]][option]
                mask |= branch.row.mask(0, cut)
                solved = fork.suffixes[block.classes[j], cut]
                yield from self.walk(branch, solved, w, len(branch.items), e)
        yield self._shared(chain, mask, k)
        yield from self._groups(block, between, taken, e)

    def _shared(self, chain: Chain, mask: int, k: int) -> Part:
        mode = self.ranges(chain).sizes.modes[k]
        return Part(mask, mode.replicas, mode.recompute, mode.tensor)

    def _groups(self, block: Block, between: BlockTables, taken: Taken, e: int) -> Iterator[Part]:
        for i, j in taken.groups:
            yield self._part(block, i, j, e, self._group(between, i, j, e))
