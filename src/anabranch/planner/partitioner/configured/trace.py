"""From solved states back to the stages: at every state, some choice that gives its value."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from anabranch.graph.opgraph import bits
from anabranch.planner.partitioner.chains import Block, Chain
from anabranch.planner.partitioner.configured.menu import Offers
from anabranch.planner.partitioner.configured.prices import NEVER, Ints
from anabranch.planner.partitioner.configured.reach import ConfiguredReach
from anabranch.planner.partitioner.configured.shapes import Shape
from anabranch.planner.partitioner.configured.share import Together
from anabranch.planner.partitioner.configured.states import Passed, Solved
from anabranch.planner.toolkit.prices import Mode


@dataclass(frozen=True, slots=True)
class Chosen:
    """A stage to be: operators, configuration, use of its devices."""

    mask: int
    microbatch_size: int
    k: int
    mode: Mode


class Trace:
    """Finds the stages of what a ``ConfiguredReach`` solved."""

    def __init__(self, reach: ConfiguredReach) -> None:
        self._reach = reach
        self._configs = reach.menu.configs

    def stages(self, solved: Solved, devices: int) -> list[Chosen]:
        """The stages of the whole model on at most so many devices, which must suffice."""
        return list(self._from(solved, 0, 0, None, devices))

    def _from(
        self, solved: Solved, j: int, column: int, before: int | None, devices: int
    ) -> Iterator[Chosen]:
        """Stages from cut j on.

        Args:
            solved: a chain.
            j: the cut.
            column: of what follows the chain.
            before: configuration of the stage that ends at the cut; None if there is none.
            devices: at most.
        """
        if j == solved.stop:
            return
        target = NEVER - 1
        if before is not None:
            target = int(solved.required[j, before, column, devices])
        offers = solved.offers[j]
        if offers is not None:
            needed = self._needed(offers, self._held(offers, solved, column, devices), before)
            if needed.min() <= target:
                yield from self._stage(solved, offers, int(needed.argmin()), column, devices)
                return
        yield from self._through(solved, j, column, before, devices, target)

    def _needed(self, offers: Offers, held: Ints, before: int | None) -> Ints:
        """What stages that hold so much require of the one before."""
        if before is None:
            return held
        return np.where(held < NEVER, held + self._configs.more[before, offers.config], NEVER)

    def _held(self, offers: Offers, solved: Solved, column: int, devices: int) -> Ints:
        """What each of some stages holds with these devices for it and what follows."""
        left = devices - offers.devices
        required = solved.required[offers.row, offers.config, column, np.maximum(left, 0)]
        held = self._configs.held(offers.config, np.where(left >= 0, required, NEVER))
        return np.where(held <= offers.most, held, NEVER)

    def _stage(
        self, solved: Solved, offers: Offers, index: int, column: int, devices: int
    ) -> Iterator[Chosen]:
        """One stage and what follows it."""
        yield self._chosen(offers, index)
        row, c = int(offers.row[index]), int(offers.config[index])
        left = devices - int(offers.devices[index])
        if row <= solved.stop:
            yield from self._from(solved, row, column, c, left)
            return
        position, head = self._head(solved, row)
        target = int(solved.required[row, c, column, left])
        yield from self._through(solved, position, column, c, left, target, head=head)

    def _chosen(self, offers: Offers, index: int) -> Chosen:
        b, k = self._configs.pairs[int(offers.config[index])]
        return Chosen(offers.mask(index), b, k, self._reach.menu.modes[int(offers.mode[index])])

    @staticmethod
    def _head(solved: Solved, row: int) -> tuple[int, Shape]:
        """The block and the shape that a row behind those of the cuts stands for."""
        at = row - solved.stop - 1
        for p in sorted(solved.passed):
            if at < len(solved.passed[p].heads):
                return p, solved.passed[p].heads[at]
            at -= len(solved.passed[p].heads)
        raise AssertionError("every row stands for a shape")

    def _alone(
        self, solved: Solved, j: int, column: int, c: int, devices: int, target: int
    ) -> Iterator[Chosen]:
        """Stages from cut j on, if the first stages have configuration c and hold no more."""
        if solved.first[j, c, column, devices] <= target:
            offers = solved.offers[j]
            assert offers is not None
            held = self._held(offers, solved, column, devices)
            held = np.where(offers.config == c, held, NEVER)
            yield from self._stage(solved, offers, int(held.argmin()), column, devices)
        else:
            yield from self._through(solved, j, column, c, devices, target, alike=True)

    def _through(
        self,
        solved: Solved,
        p: int,
        column: int,
        before: int | None,
        devices: int,
        target: int,
        *,
        head: Shape | None = None,
        alike: bool = False,
    ) -> Iterator[Chosen]:
        """The block at position p and what follows it."""
        block = solved.chain.items[p]
        assert isinstance(block, Block)
        passed = solved.passed[p]
        choices = passed.choices
        for s in np.unique(choices.shape) if head is None else [0]:
            fits = (choices.shape == s) & (choices.owner == column) & (choices.devices <= devices)
            mine = np.flatnonzero(fits)
            if not len(mine):
                continue
            first = before is None
            together = Together(self._reach.arithmetic, block, passed, mine, head, alike, first)
            best = together.share(slice(before or 0, (before or 0) + 1))
            left = devices - choices.devices[mine]
            needed = best[-1][0, np.arange(len(mine)), left]
            if needed.min() <= target:
                at = int(needed.argmin())
                choice, wanted = int(mine[at]), int(needed[at])
                shared = [each[0, at] for each in best]
                yield from self._branches(
                    block, passed, choice, shared, int(left[at]), wanted, before, head, alike
                )
                yield from self._behind(solved, p, column, passed, choice)
                return
        raise AssertionError("some choice gives the value of a state")

    def _branches(
        self,
        block: Block,
        passed: Passed,
        choice: int,
        shared: list[Ints],
        devices: int,
        target: int,
        before: int | None,
        head: Shape | None,
        alike: bool,
    ) -> Iterator[Chosen]:
        """Share out the devices over the branches, last branch first."""
        mine = np.array([choice])
        arithmetic, first = self._reach.arithmetic, before is None
        together = Together(arithmetic, block, passed, mine, head, alike, first)
        tables, runs, shape = together.tables(), together.runs(), together.shape
        at = before or 0
        column = int(passed.choices.column[choice])
        m = len(tables)
        while m:
            options = [(m - 1, tables[m - 1])] + [(i, t) for (i, j), t in runs.items() if j == m]
            for i, table in options:
                for d in range(devices + 1):
                    if max(table[at, 0, d], shared[i][devices - d]) <= target:
                        break
                else:
                    continue
                break
            if table is tables[m - 1]:
                branch = passed.branches[block.classes[i], shape.cuts[i]]
                cut = head.cuts[i] if head else 0
                for each in (
                    self._alone(branch, cut, column, at, d, target)
                    if alike
                    else self._from(branch, cut, column, before, d)
                ):
                    yield self._moved(each, block, i)
            else:
                yield self._run(passed, (i, m), column, before, d, alike)
            m, devices = i, devices - d

    @staticmethod
    def _moved(chosen: Chosen, block: Block, branch: int) -> Chosen:
        """A stage of the first branch of a class, in another branch of it."""
        if block.classes[branch] == branch:
            return chosen
        source = block.branches[block.classes[branch]]
        target = block.branches[branch]
        return replace(chosen, mask=_moved(chosen.mask, source, target))

    def _run(
        self,
        passed: Passed,
        run: tuple[int, int],
        column: int,
        before: int | None,
        devices: int,
        alike: bool,
    ) -> Chosen:
        offers = passed.groups[run]
        after = next(iter(passed.branches.values())).after[offers.config, column]
        held = self._configs.held(offers.config, after)
        held = np.where((held <= offers.most) & (offers.devices <= devices), held, NEVER)
        if alike:
            held = np.where(offers.config == before, held, NEVER)
        else:
            held = self._needed(offers, held, before)
        return self._chosen(offers, int(held.argmin()))

    def _behind(
        self, solved: Solved, p: int, column: int, passed: Passed, choice: int
    ) -> Iterator[Chosen]:
        """The first stage behind a block and what follows it."""
        choices = passed.choices
        c, shape = int(choices.config[choice]), int(choices.shape[choice])
        devices = int(choices.devices[choice])
        if c < 0:
            return
        if shape:
            offers = passed.behind
            assert offers is not None
            stops = solved.stop - p - 1
            held = self._held(offers, solved, column, devices)
            mine = (offers.config == c) & (1 + offers.which // stops == shape)
            at = int(np.where(mine, held, NEVER).argmin())
            yield from self._stage(solved, offers, at, column, devices)
        elif choices.alike[choice]:
            target = int(solved.alike[p + 1, c, column, devices])
            yield from self._through(solved, p + 1, column, c, devices, target, alike=True)
        else:
            target = int(solved.first[p + 1, c, column, devices])
            yield from self._alone(solved, p + 1, column, c, devices, target)


def _operators(chain: Chain) -> list[int]:
    """Operators in the order of the chain."""
    found: list[int] = []
    for item in chain.items:
        if isinstance(item, Block):
            for branch in item.branches:
                found += _operators(branch)
        else:
            found.append(item)
    return found


def _moved(mask: int, source: Chain, target: Chain) -> int:
    """The operators of one branch that are in the places of these in another like it."""
    place = dict(zip(_operators(source), _operators(target), strict=True))
    return sum(1 << place[op] for op in bits(mask))
