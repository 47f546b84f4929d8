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
to it, for a few ways to cut them (``configured_shapes``).

Where a block follows a block directly, a choice is not one stage but one per branch of the second.
Only those are looked at whose first stages all have one configuration.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np

from anabranch.errors import BudgetError
from anabranch.planner.partitioner.chains import Block, Chain
from anabranch.planner.partitioner.configured_menu import Menu, Offers
from anabranch.planner.partitioner.configured_prices import NEVER, Ints
from anabranch.planner.partitioner.configured_shapes import Shape, heads, tails

Groups = dict[tuple[int, int], Ints]


@dataclass
class Choices:
    """What may follow a block; arrays have one entry per choice.

    Attributes:
        owner: the column, in the chain's own arrays, of what follows the chain.
        column: the column of the branches' arrays.
        devices: used by what follows.
        shape: how much of the branches the first stage behind the block holds.
        config: configuration of the first stage; -1 if the chain ends with the block.
        alike: the first stages are those of another block.
    """

    owner: Ints
    column: Ints
    devices: Ints
    shape: Ints
    config: Ints
    alike: Ints


@dataclass
class Passed:
    """How a block was solved.

    Attributes:
        choices: what may follow it.
        shapes: per shape, the cut of every branch at which the stage behind begins; then which
            stages those are.
        heads: per shape, the cut at which a stage before it ends.
        branches: by first branch of a class and its end.
        groups: of runs of whole branches, what they offer.
    """

    choices: Choices
    shapes: list[Shape]
    heads: list[Shape]
    branches: dict[tuple[int, int], Solved]
    groups: dict[tuple[int, int], Offers]
    behind: Offers | None


@dataclass
class Solved:
    """A chain up to a cut, with several things that may follow; arrays are [row, config, column,
    devices].

    Attributes:
        required: rows are the cuts, then the shapes of the heads of its blocks.
        first: rows are the cuts; stages that are ranges (with heads).
        alike: likewise, where a block begins at the cut and its first stages are all of one
            configuration.
        offers: per cut, the stages that begin there.
        passed: per position, how a block was solved.
        after: what follows requires: [config, column].
    """

    chain: Chain
    stop: int
    after: Ints
    required: Ints
    first: Ints
    alike: Ints
    offers: list[Offers | None]
    passed: dict[int, Passed] = field(default_factory=dict)


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
        self.devices = devices
        self.budget = budget
        self._bound_s = np.inf
        self._spent = 0
        # A range of the longest row has a price in every mode and size, before anything is solved.
        self._spend((len(chain.items) + 1) ** 2 * menu.entries)

    def solve(self, bound_s: float) -> Solved:
        """All states within a bound.

        Raises:
            BudgetError: if there are too many.
        """
        self._bound_s = bound_s
        self._spent = 0
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
        self._spend(count * prod(shape))
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
                first[j] = self._least(offers, self._hold(offers, required))
            np.minimum(required[j], self._require(first[j]), out=required[j])
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

    def _hold(self, offers: Offers, required: Ints) -> Ints:
        """What each of some stages holds, whatever the devices: [offer, column, devices]."""
        self._spend(len(offers) * required.shape[-1] * required.shape[-2])
        found = required[offers.row, offers.config]
        shifted = np.full(found.shape, NEVER)
        for d in np.unique(offers.devices):
            if d <= self.devices:
                mine = offers.devices == d
                shifted[mine, :, d:] = found[mine, :, : self.devices + 1 - d]
        held = self.menu.configs.held(offers.config, shifted)
        return np.where(held <= offers.most[:, None, None], held, NEVER)

    def _least(self, offers: Offers, held: Ints) -> Ints:
        """The least of the stages of every configuration."""
        result = np.full((len(self.menu.configs), *held.shape[1:]), NEVER)
        for c in np.unique(offers.config):
            result[c] = held[offers.config == c].min(axis=0)
        return result

    def _require(self, first: Ints) -> Ints:
        """What first stages require of a stage before them, by its configuration."""
        configs = self.menu.configs
        result = np.full(first.shape, NEVER)
        for y in range(len(configs)):
            if (first[y] < NEVER).any():
                self._spend(first.size)
                np.minimum(result, first[y] + configs.more[:, y, None, None], out=result)
        return np.minimum(result, NEVER)

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
        shared = self.share(block, passed, mine, head=head, alike=alike, leads=leads)[-1]
        used = passed.choices.devices[mine]
        target = solved.alike[p] if alike else solved.required[p if row is None else row]
        for q, (owner, devices) in enumerate(zip(passed.choices.owner[mine], used, strict=True)):
            column = target[:, owner, devices:]
            np.minimum(column, shared[:, q, : self.devices + 1 - devices], out=column)

    def share(
        self,
        block: Block,
        passed: Passed,
        mine: Ints,
        *,
        head: Shape | None = None,
        alike: bool = False,
        leads: bool = False,
        config: slice = slice(None),
    ) -> list[Ints]:
        """What the first branches require together, for none to all of them.

        Args:
            block: the block.
            passed: how it was solved.
            mine: choices of what follows, all of one shape.
            head: how much of the branches a stage before the block holds.
            alike: what their first stages hold, all of one configuration, instead.
            leads: nothing comes before, so that only what is possible matters.
            config: of which configurations.

        Returns:
            Arrays [config, choice, devices].
        """
        tables = self.tables(block, passed, mine, head=head, alike=alike, leads=leads)
        tables = [table[config] for table in tables]
        best = [np.zeros_like(tables[0])]
        runs = self.runs(block, passed, mine, head=head, alike=alike, leads=leads)
        for m, table in enumerate(tables, start=1):
            now = self._combine(best[m - 1], table)
            for (i, j), run in runs.items():
                if j == m:
                    now = np.minimum(now, self._combine(best[i], run[config]))
            best.append(now)
        return best

    def tables(
        self,
        block: Block,
        passed: Passed,
        mine: Ints,
        *,
        head: Shape | None,
        alike: bool,
        leads: bool,
    ) -> list[Ints]:
        """What each branch requires: [config, choice, devices]."""
        shape = passed.shapes[int(passed.choices.shape[mine[0]])]
        columns = passed.choices.column[mine]
        result = []
        for b, k in enumerate(block.classes):
            branch = passed.branches[k, shape.cuts[b]]
            cut = head.cuts[b] if head else 0
            if not alike:
                table = branch.required[cut][:, columns]
            else:
                # A branch that the stage behind holds as a whole has no first stage: row 0 of
                # ``first`` says never.
                table = np.minimum(branch.first[cut], branch.alike[cut])[:, columns]
            result.append(_lead(table) if leads else table)
        return result

    def runs(
        self,
        block: Block,
        passed: Passed,
        mine: Ints,
        *,
        head: Shape | None,
        alike: bool,
        leads: bool,
    ) -> Groups:
        """What runs of whole branches require, by first branch and end."""
        shape = passed.shapes[int(passed.choices.shape[mine[0]])]
        sizes = [len(branch.items) for branch in block.branches]
        left = [stop - (head.cuts[b] if head else 0) for b, stop in enumerate(shape.cuts)]
        after = next(iter(passed.branches.values())).after[:, passed.choices.column[mine]]
        pool = np.broadcast_to(after[None, ..., None], (1, *after.shape, self.devices + 1))
        result = {}
        for (i, j), offers in passed.groups.items():
            if left[i:j] == sizes[i:j]:
                table = self._least(offers, self._hold(offers, pool))
                table = table if alike else self._require(table)
                result[i, j] = _lead(table) if leads else table
        return result

    def _combine(self, one: Ints, other: Ints) -> Ints:
        """The least maximum of two, sharing out the devices."""
        self._spend(one.size * (self.devices + 1) // 2)
        result = np.full(one.shape, NEVER)
        for d in range(self.devices + 1):
            if d and (one[..., d] == one[..., d - 1]).all():
                continue
            both = np.maximum(one[..., d, None], other[..., : self.devices + 1 - d])
            np.minimum(result[..., d:], both, out=result[..., d:])
        return result

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
        held = self._hold(offers, solved.required)
        of = 1 + offers.which // len(stops)
        return offers, {
            int(s): self._least(picked(offers, of == s), held[of == s]) for s in np.unique(of)
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
        self._spend(len(found) * len(kept))
        after, column = np.unique(required, axis=0, return_inverse=True)
        owner, devices, shape, config, alike_ = table.T
        choices = Choices(owner, column.reshape(-1), devices, shape, config, alike_)
        return choices, np.ascontiguousarray(after.T)

    def _spend(self, states: int) -> None:
        self._spent += states
        if self._spent > self.budget:
            raise BudgetError(
                f"planning {self.chain.row.cost.graph.name or 'the model'} with a micro-batch "
                f"size per stage takes more than {self.budget:,} states for one bound on the "
                f"period, its budget; {self._spent:,} were needed before the end was in sight: "
                "give one micro-batch size, capture coarser operators, plan without "
                "per_stage_microbatch and kfkb, or allow more states"
            )


def joined(offers: Sequence[Offers | None]) -> Offers | None:
    """Offers of several kinds as one; ``which`` counts through them."""
    some = [each for each in offers if each is not None]
    if len(some) < 2:
        return some[0] if some else None
    kinds = [np.full(len(each), i) for i, each in enumerate(some)]
    kind = np.concatenate(kinds)
    which = np.concatenate([each.which for each in some])

    def masks(index: int) -> int:
        return some[int(kind[index])].masks(int(which[index]))

    return Offers(
        np.concatenate([each.config for each in some]),
        np.concatenate([each.devices for each in some]),
        np.concatenate([each.most for each in some]),
        np.concatenate([each.row for each in some]),
        np.concatenate([each.mode for each in some]),
        masks,
        np.arange(len(kind)),
    )


def picked(offers: Offers, some: np.ndarray) -> Offers:
    """Some of these offers."""
    return Offers(
        offers.config[some],
        offers.devices[some],
        offers.most[some],
        offers.row[some],
        offers.mode[some],
        offers.masks,
        offers.which[some],
    )


def _lead(table: Ints) -> Ints:
    """Whatever the configuration of what comes before: there is nothing."""
    return np.where(table.min(axis=0, keepdims=True) < NEVER, 0, NEVER)


def _steps(table: Ints) -> np.ndarray:
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
