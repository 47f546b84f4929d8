"""The tables that one bound leaves behind, and the stages that can be read from them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from anabranch.planner.partitioner.chains import Block, Chain
from anabranch.planner.partitioner.parts import Part
from anabranch.planner.partitioner.ranges import Bools, Ints
from anabranch.planner.partitioner.sharing import Sharing, Taken


@dataclass
class Join:
    """A stage from a block's branches up to a cut of the chain that holds the block.

    Attributes:
        sharing: what it may take of the branches.
        place: for every height, its place in ``sharing``.
        first: the first cut; the tables below have an entry for it and each following one.
        needs: fewest devices, those of the stage included: [cut, u, e].
        degree: for these, the place of the stage's degree: [cut, u, e].
        total: and the devices of the branches' remainders: [cut, u, e].
    """

    sharing: Sharing
    place: Ints
    first: int
    needs: Ints
    degree: Ints
    total: Ints


@dataclass
class Fork:
    """A stage from a cut of the chain that holds a block into the block's branches.

    Attributes:
        sharing: what it may take of the branches.
        place: for every height, its place in ``sharing``.
        caps: largest heights of the branches: [u].
        needs: as for ``Join``, but from the block's cut backwards; so ``degree`` and ``total``.
        suffixes: (class, cut) -> the branch from there on.
        cuts: class -> cut of each option.
    """

    sharing: Sharing
    place: Ints
    caps: Ints
    needs: Ints
    degree: Ints
    total: Ints
    suffixes: dict[tuple[int, int], Solved]
    cuts: dict[int, list[int]]


@dataclass
class Between:
    """A block in its chain.

    Attributes:
        caps: heights at which what comes before the block gets dearer: [u].
        branches: class -> the branch, solved on its own.
        groups: fewest devices for branches i .. j - 1 as one stage: [j, i, e].
        worthwhile: which of these to consider.
        alone: per branch what it needs on its own: [u, e].
        whole: what the first j branches need: [u, e].
        join: stages that leave the block.
        fork: stages that enter it.
    """

    caps: Ints
    branches: dict[int, Solved]
    groups: Ints
    worthwhile: Bools
    alone: list[Ints]
    whole: list[Ints]
    join: Join | None = None
    fork: Fork | None = None


@dataclass
class Solved:
    """One chain, from one cut on, for several caps.

    Attributes:
        caps: largest heights: [u].
        start: the cut.
        devices: fewest for what lies between it and cut j, if the stage after that has height
            h - 1: [u, h, j].
        need: fewest devices for a stage: [h, j, i].
        between: position -> the block there.
    """

    caps: Ints
    start: int
    devices: Ints
    need: Ints
    between: dict[int, Between] = field(default_factory=dict)


class Found:
    """The answer for one bound: fewest devices per cap, and the stages behind them.

    Attributes:
        devices: per cap.
    """

    def __init__(self, chain: Chain, degrees: Sequence[int], solved: Solved) -> None:
        self._chain = chain
        self._degrees = degrees
        self._solved = solved
        self.devices = solved.devices[:, 0, -1]

    def parts(self, u: int) -> list[Part]:
        """The stages for one cap, in no particular order."""
        return list(self._walk(self._chain, self._solved, u, len(self._chain.items), 0))

    def _walk(self, chain: Chain, solved: Solved, u: int, j: int, h: int) -> Iterator[Part]:
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
    def _last_stage(solved: Solved, u: int, j: int, h: int) -> tuple[int, int] | None:
        start = solved.start
        column = solved.need[min(h, len(solved.need) - 1), j, start:j]
        goal = solved.devices[u, h, j]
        found = np.flatnonzero(column + solved.devices[u, h + 1, start:j] == goal)
        return (start + int(found[0]), int(column[found[0]])) if len(found) else None

    def _through_block(
        self, chain: Chain, solved: Solved, u: int, j: int, h: int
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
        self, chain: Chain, solved: Solved, p: int, between: Between, goal: tuple[int, int]
    ) -> tuple[int, int, list[Part]] | None:
        u, h = goal
        for w, cap in enumerate(between.caps):
            needed = solved.devices[u, cap + 1, p] + between.whole[-1][w, h]
            if needed == solved.devices[u, h, p + 1]:
                return p, int(cap) + 1, list(self._branches(chain, p, between, w, h))
        return None

    def _from_fork(
        self, chain: Chain, solved: Solved, p: int, between: Between, goal: tuple[int, int]
    ) -> tuple[int, int, list[Part]] | None:
        u, h = goal
        fork = between.fork
        if fork is None:
            return None
        for back in range(len(fork.needs)):
            for w, cap in enumerate(fork.caps):
                needed = solved.devices[u, cap + 2, p - 1 - back] + fork.needs[back, w, h]
                if needed == solved.devices[u, h, p + 1]:
                    parts = list(self._fork(chain, p, between, fork, (back, w, h)))
                    return p - 1 - back, int(cap) + 2, parts
        return None

    def _into_join(
        self, chain: Chain, solved: Solved, p: int, between: Between, goal: tuple[int, int, int]
    ) -> tuple[int, int, list[Part]] | None:
        u, h, j = goal
        join = between.join
        assert join is not None
        after = j - join.first
        if after >= len(join.needs) or h + 1 >= join.needs.shape[2]:
            return None
        for w, cap in enumerate(between.caps):
            needed = solved.devices[u, cap + 1, p] + join.needs[after, w, h + 1]
            if needed == solved.devices[u, h, j]:
                parts = list(self._join(chain, p, between, join, (after, w, h + 1)))
                return p, int(cap) + 1, parts
        return None

    def _branches(self, chain: Chain, p: int, between: Between, w: int, e: int) -> Iterator[Part]:
        block = chain.items[p]
        assert isinstance(block, Block)
        j = len(block.branches)
        while j:
            if between.whole[j][w, e] == between.whole[j - 1][w, e] + between.alone[j - 1][w, e]:
                j -= 1
                branch = block.branches[j]
                solved = between.branches[block.classes[j]]
                yield from self._walk(branch, solved, w, len(branch.items), e)
                continue
            i = next(
                i
                for i in range(j - 1)
                if between.whole[i][w, e] + between.groups[j, i, e] == between.whole[j][w, e]
            )
            yield Part(block.row.mask(i, j), int(between.groups[j, i, e]))
            j = i

    def _join(
        self, chain: Chain, p: int, between: Between, join: Join, at: tuple[int, int, int]
    ) -> Iterator[Part]:
        block = chain.items[p]
        assert isinstance(block, Block)
        after, w, e = at
        k = int(join.degree[at])
        taken = join.sharing.taken(w, int(join.place[e]), k, int(join.total[at]))
        mask = chain.row.mask(p + 1, join.first + after)
        for j, cut in enumerate(taken.options):
            if cut >= 0:
                branch = block.branches[j]
                mask |= branch.row.mask(cut, len(branch.items))
                yield from self._walk(branch, between.branches[block.classes[j]], w, cut, e)
        yield Part(mask, self._degrees[k])
        yield from self._groups(block, between, taken, e)

    def _fork(
        self, chain: Chain, p: int, between: Between, fork: Fork, at: tuple[int, int, int]
    ) -> Iterator[Part]:
        block = chain.items[p]
        assert isinstance(block, Block)
        back, w, e = at
        k = int(fork.degree[at])
        taken = fork.sharing.taken(w, int(fork.place[e]), k, int(fork.total[at]))
        mask = chain.row.mask(p - 1 - back, p)
        for j, option in enumerate(taken.options):
            if option >= 0:
                branch = block.branches[j]
                cut = fork.cuts[block.classes[j]][option]
                mask |= branch.row.mask(0, cut)
                solved = fork.suffixes[block.classes[j], cut]
                yield from self._walk(branch, solved, w, len(branch.items), e)
        yield Part(mask, self._degrees[k])
        yield from self._groups(block, between, taken, e)

    @staticmethod
    def _groups(block: Block, between: Between, taken: Taken, e: int) -> Iterator[Part]:
        for i, j in taken.groups:
            yield Part(block.row.mask(i, j), int(between.groups[j, i, e]))
