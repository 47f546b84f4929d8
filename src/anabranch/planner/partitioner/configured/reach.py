"""Fewest samples in flight for a number of devices, if no stage may take longer than a bound.

GraphPipe's Algorithm 1 and 2 with schedule configurations, from the sink backwards. What comes
before a cut needs to know one thing of what follows: how many samples a stage of configuration x
that ends at the cut must hold. So the states are::

    required[cut, x, D]     for what follows on at most D devices, the least of that
    first[cut, y, D]        the least that the stage that begins at the cut holds, if it has
                            configuration y

    first[j, y, D]     =  min over stages [j, e) of y on d devices that may hold the result:
                          whole micro-batches, at least a group, of required[e, y, D - d]
    required[j, x, D]  =  min over y of  first[j, y, D] + more[x, y]                 (Table 2)

To hold less never hurts anyone further up, so the least is all that needs to be kept. (The paper
enumerates what follows with its in-flight samples instead, B of them.)

What follows a block is one choice for all its branches. So it is enumerated: all choices that are
not worse than another in devices and in what they require of any configuration. For each, every
branch is a chain of its own, and branches share out the devices::

    required of both, D  =  min over D' of  max(required of one, D';  of the other, D - D')

All choices are columns of one array, so that a branch is solved for them at once. Stages may also
be runs of whole branches; and a stage behind or before a block may hold the ends of branches next
to it, for a few ways to cut them (``configured.shapes``).

Where a block follows a block directly, a choice is not one stage but one per branch of the second.
Only those are looked at whose first stages all have one configuration.
"""

from __future__ import annotations

from math import prod

import numpy as np
from numpy.typing import NDArray

from anabranch.planner.partitioner.chains import Block, Chain
from anabranch.planner.partitioner.configured.menu import Menu, Offers
from anabranch.planner.partitioner.configured.prices import NEVER, Ints
from anabranch.planner.partitioner.configured.shapes import Shape, heads, tails
from anabranch.planner.partitioner.configured.share import Together
from anabranch.planner.partitioner.configured.states import (
    Arithmetic,
    Choices,
    Passed,
    Solved,
    joined,
    picked,
)


class ConfiguredReach:
    """Solves one model for any bound on the seconds per sample.

    Args:
        chain: the whole model.
        menu: prices its stages.
        devices: most devices.
        budget: most states that one bound may take.
    """

    def __init__(self, chain: Chain, menu: Menu, *, devices: int, budget: int) -> None:
        self.chain = chain
        self.menu = menu
        name = chain.row.cost.graph.name
        self.arithmetic = Arithmetic(menu, devices=devices, budget=budget, name=name)
        self.devices = devices
        self._bound_s = np.inf
        # Every range has a price in every size and mode, before anything is solved.
        self.arithmetic.spend(_ranges(chain) * menu.entries)

    def solve(self, bound_s: float) -> Solved:
        """All states within a bound.

        Raises:
            BudgetError: if there are too many.
        """
        self._bound_s = bound_s
        self.arithmetic.spent = 0
        nothing = np.zeros((len(self.menu.configs), 1), dtype=np.int64)
        return self._solve(self.chain, len(self.chain.items), nothing, False, True)

    def fewest(self, solved: Solved) -> int | None:
        """Fewest devices of the whole model; None if they do not suffice."""
        possible = np.flatnonzero((solved.required[0, :, 0] < NEVER).any(axis=0))
        return int(possible[0]) if len(possible) else None

    def _solve(self, chain: Chain, stop: int, after: Ints, alike: bool, leads: bool) -> Solved:
        """Solve items 0 .. stop of a chain.

        Args:
            chain: the chain.
            stop: the cut that it is solved up to.
            after: what follows requires of a configuration, one column for each that may follow.
            alike: whether ``Solved.alike`` is needed for the first cut.
            leads: nothing comes before the chain.
        """
        rows = {p: heads(chain, p) for p in range(1, stop) if isinstance(chain.items[p], Block)}
        starts = dict(zip(rows, np.cumsum([stop + 1, *map(len, rows.values())]), strict=False))
        shape = (len(after), after.shape[1], self.devices + 1)
        count = stop + 1 + sum(map(len, rows.values()))
        self.arithmetic.spend(count * prod(shape))
        required = np.full((count, *shape), NEVER)
        required[stop] = after[:, :, None]
        first, same = (np.full((stop + 1, *shape), NEVER) for _ in range(2))
        solved = Solved(chain, stop, after, required, first, same, [None] * stop)
        for j in reversed(range(stop)):
            item = chain.items[j]
            if isinstance(item, Block):
                before = j > 0 and isinstance(chain.items[j - 1], Block)
                wanted = before or (alike and j == 0)
                head = rows.get(j, [])
                self._pass(solved, item, j, head, starts.get(j, 0), wanted, leads and j == 0)
            offers = self._offers(chain, stop, j, rows, starts)
            solved.offers[j] = offers
            if offers is not None:
                first[j] = self.arithmetic.least(offers, self.arithmetic.hold(offers, required))
            np.minimum(required[j], self.arithmetic.require(first[j]), out=required[j])
        return solved

    def _offers(
        self,
        chain: Chain,
        stop: int,
        j: int,
        rows: dict[int, list[Shape]],
        starts: dict[int, int],
    ) -> Offers | None:
        """Stages that begin at cut j."""
        n = chain.row.size + 1
        stops = np.arange(j + 1, stop + 1)
        found = [self.menu.offers(self.menu.row(chain.row), j * n + stops, stops, self._bound_s)]
        for p, shapes in rows.items():
            if p > j and shapes:
                masks = tuple(shape.mask | chain.row.mask(j, p) for shape in shapes)
                at = np.arange(len(shapes))
                priced = self.menu.sets(masks)
                found.append(self.menu.offers(priced, at, starts[p] + at, self._bound_s))
        return joined(found)

    def _pass(
        self,
        solved: Solved,
        block: Block,
        p: int,
        before: list[Shape],
        start: int,
        alike: bool,
        leads: bool,
    ) -> None:
        """Add to ``solved`` what leads through the block at position p."""
        shapes = [Shape.none(block, behind=True), *tails(solved.chain, p, solved.stop)]
        behind, held = self._behind(solved, p, shapes)
        choices, after = self._choices(solved, p, held)
        branches = {
            (k, shape.cuts[b]): None
            for shape in (shapes[s] for s in np.unique(choices.shape))
            for b, k in enumerate(block.classes)
        }
        solutions = {
            (k, stop): self._solve(block.branches[k], stop, after, alike, leads)
            for k, stop in branches
        }
        groups = self._groups(block)
        passed = Passed(choices, shapes, before, solutions, groups, behind)
        solved.passed[p] = passed
        if not len(choices.owner):
            return
        for s in np.unique(choices.shape):
            mine = np.flatnonzero(choices.shape == s)
            self._through(solved, block, p, passed, mine, leads=leads)
            if alike:
                self._through(solved, block, p, passed, mine, alike=True)
        plain = np.flatnonzero(choices.shape == 0)
        for h, shape in enumerate(before):
            self._through(solved, block, p, passed, plain, head=shape, row=start + h)

    def _through(
        self,
        solved: Solved,
        block: Block,
        p: int,
        passed: Passed,
        mine: Ints,
        *,
        head: Shape | None = None,
        row: int | None = None,
        alike: bool = False,
        leads: bool = False,
    ) -> None:
        """Improve a row by some choices of one shape."""
        if not len(mine):
            return
        together = Together(self.arithmetic, block, passed, mine, head, alike, leads)
        shared = together.share()[-1]
        used = passed.choices.devices[mine]
        target = solved.alike[p] if alike else solved.required[p if row is None else row]
        for q, (owner, devices) in enumerate(zip(passed.choices.owner[mine], used, strict=True)):
            column = target[:, owner, devices:]
            np.minimum(column, shared[:, q, : self.devices + 1 - devices], out=column)

    def _groups(self, block: Block) -> dict[tuple[int, int], Offers]:
        n = block.row.size + 1
        priced = self.menu.row(block.row)
        result = {}
        for i in range(n - 2):
            for j in range(i + 2, n):
                at = np.array([i * n + j])
                offers = self.menu.offers(priced, at, np.zeros(1, dtype=np.int64), self._bound_s)
                if offers is not None:
                    result[i, j] = offers
        return result

    def _behind(
        self, solved: Solved, p: int, shapes: list[Shape]
    ) -> tuple[Offers | None, dict[int, Ints]]:
        """Stages behind the block that hold ends of its branches, and what those of a shape hold.

        Their ``row`` is the cut where they end, their ``which`` is ``shape * stops + stop``.
        """
        chain, stop = solved.chain, solved.stop
        stops = list(range(p + 2, stop + 1))
        if not stops or len(shapes) == 1:
            return None, {}
        masks = tuple(shape.mask | chain.row.mask(p + 1, q) for shape in shapes[1:] for q in stops)
        rows = np.array(stops * (len(shapes) - 1))
        offers = self.menu.offers(self.menu.sets(masks), np.arange(len(masks)), rows, self._bound_s)
        if offers is None:
            return None, {}
        held = self.arithmetic.hold(offers, solved.required)
        of = 1 + offers.which // len(stops)
        return offers, {
            int(s): self.arithmetic.least(picked(offers, of == s), held[of == s])
            for s in np.unique(of)
        }

    def _choices(self, solved: Solved, p: int, behind: dict[int, Ints]) -> tuple[Choices, Ints]:
        """What may follow the block at position p, and what that requires."""
        more = self.menu.configs.more
        columns = solved.after.shape[1]
        found: list[tuple[int, int, int, int, int]] = []
        vectors: list[Ints] = []
        if p + 1 == solved.stop:
            found = [(q, 0, 0, -1, 0) for q in range(columns)]
            vectors = list(solved.after.T)
        else:
            sources = [(solved.first[p + 1], 0, 0), (solved.alike[p + 1], 0, 1)]
            sources += [(held, s, 0) for s, held in behind.items()]
            for table, s, alike in sources:
                for c, q, d in zip(*np.nonzero(_steps(table)), strict=True):
                    found.append((int(q), int(d), s, int(c), alike))
                    vectors.append(table[c, q, d] + more[:, c])
        if not found:
            empty = np.zeros(0, dtype=np.int64)
            return Choices(*[empty] * 6), np.zeros((len(more), 0), dtype=np.int64)
        table = np.array(found, dtype=np.int64)
        required = np.array(vectors, dtype=np.int64)
        kept = _undominated(table, required)
        table, required = table[kept], required[kept]
        self.arithmetic.spend(len(found) * len(kept))
        after, column = np.unique(required, axis=0, return_inverse=True)
        owner, devices, shape, config, alike_ = table.T
        choices = Choices(owner, column.reshape(-1), devices, shape, config, alike_)
        return choices, np.ascontiguousarray(after.T)


def _ranges(chain: Chain) -> int:
    """Pairs of cuts in a chain, its branches and their groups."""
    count = (len(chain.items) + 1) ** 2
    for block in chain.blocks:
        count += (len(block.branches) + 1) ** 2
        count += sum(_ranges(block.branches[k]) for k in set(block.classes))
    return count


def _steps(table: Ints) -> NDArray[np.bool_]:
    """Where one more device makes less."""
    falls = table < NEVER
    falls[..., 1:] &= table[..., 1:] < table[..., :-1]
    return falls


def _undominated(table: Ints, required: Ints) -> Ints:
    """Choices that no other of the same owner and shape beats in devices and requirements."""
    order = np.lexsort((required.sum(axis=1), table[:, 1], table[:, 2], table[:, 0]))
    kept: list[int] = []
    for i in order:
        same = [k for k in kept if table[k, 0] == table[i, 0] and table[k, 2] == table[i, 2]]
        if not same or not (required[same] <= required[i]).all(axis=1).any():
            kept.append(int(i))
    return np.array(kept, dtype=np.int64)
