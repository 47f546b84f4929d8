"""Shares that a stage beside a block takes of its branches, so that the least is left to place.

    a1 --> a2 --> a3 --+
    b1 --> b2 --> b3 --+--> [ join ]        one stage may be { a3, b2, b3, join }

Each branch has options: cut at c, its remainder needs some devices and its share adds seconds and
bytes to the stage. Neighbouring whole branches may also form a stage of their own (a group). This
is a knapsack over the branches, the number of devices its capacity: for every total of at most v,
the least compute. Traffic, all-reduce and memory go along with the lightest choice and are checked
afterwards, if they can exceed their limits at all.

A group needs no more devices for fewer branches, so of all groups that end at a branch and need
the same number of devices only the largest is tried.

Arrays are [bound t, state m, mode k, devices v]; a state is a cap and a height of
``partitioner.chain_programme``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from anabranch.planner.partitioner.limits import SEARCH
from anabranch.planner.partitioner.range_prices import INFINITE, Bools, Floats, Ints

COMPUTE, TRAFFIC, REDUCE, MEMORY = range(4)


@dataclass(frozen=True)
class Options:
    """The ways to cut one branch, each with a smaller share of the stage than the one before.

    Attributes:
        devices: what the remainder needs: [t, m, c].
        shares: compute, traffic, all-reduce per mode and option, all that is spread over the
            micro-batches included, and memory: [t, k, c], memory [t, m, k, c].
    """

    devices: Ints
    shares: tuple[Floats, Floats, Floats, Floats]


@dataclass(frozen=True)
class Groups:
    """Runs of whole branches, each as one stage.

    Attributes:
        needs: fewest devices for branches i .. j - 1: [j, i, t, m].
        largest: per branch j the amounts of devices that a group ending there may need, and the
            first branch of the largest such group, -1 if there is none: (devices, [t, m]).
    """

    needs: Ints
    largest: tuple[tuple[tuple[int, NDArray[np.intp]], ...], ...]


@dataclass(frozen=True)
class Taken:
    """Per branch its option, or -1 within a group; and the groups as (first branch, last + 1)."""

    options: tuple[int, ...]
    groups: tuple[tuple[int, int], ...]


class BranchShares:
    """The lightest shares of all branches for every total of devices outside the stage.

    Args:
        carried: which of the four sums may exceed their limits; compute always does.

    Attributes:
        sums: those of ``carried``, [t, m, k, v].
    """

    def __init__(
        self, options: Sequence[Options], groups: Groups, limit: int, carried: Sequence[int]
    ) -> None:
        self._options = options
        self._groups = groups
        t, m, _ = options[0].devices.shape
        k = options[0].shares[COMPUTE].shape[1]
        first = np.zeros((t, m, k, limit + 1))
        self._sums = [dict.fromkeys(carried, first)]
        self._cuts: dict[int, tuple[NDArray[np.intp], Ints, dict[int, Floats]]] = {}
        for j, option in enumerate(options, start=1):
            self._sums.append(self._cut(option))
            for amount, starts in groups.largest[j]:
                self._group(j, amount, starts)
        self.sums = self._sums[-1]

    def _cut(self, option: Options) -> dict[int, Floats]:
        before = self._sums[-1]
        limit = before[COMPUTE].shape[-1] - 1
        amounts, _, shares = self._lightest(option, limit)
        after = {which: np.full(table.shape, np.inf) for which, table in before.items()}
        if before[COMPUTE][0, 0].size <= SEARCH.small_table:
            self._take(amounts, before, after, shares)
            return after
        # One state after the other: each has amounts of its own, and its tables fit the cache.
        for t, m in np.ndindex(option.devices.shape[:2]):
            some = np.isin(amounts, option.devices[t, m])
            self._take(
                amounts[some],
                {which: table[t, m] for which, table in before.items()},
                {which: table[t, m] for which, table in after.items()},
                {which: table[some, t, m] for which, table in shares.items()},
            )
        return after

    @staticmethod
    def _take(
        amounts: NDArray[np.intp],
        before: dict[int, Floats],
        after: dict[int, Floats],
        shares: dict[int, Floats],
    ) -> None:
        """Lower ``after`` [..., k, v] to the best share for each amount of devices."""
        count = before[COMPUTE].shape[-1]
        for a, v in enumerate(amounts.tolist()):
            total = before[COMPUTE][..., : count - v] + shares[COMPUTE][a]
            now = after[COMPUTE][..., v:]
            if len(after) > 1:
                better = total < now
                for which in after:
                    if which != COMPUTE:
                        rest = before[which][..., : count - v] + shares[which][a]
                        np.copyto(after[which][..., v:], rest, where=better)
            np.minimum(now, total, out=now)

    def _lightest(
        self, option: Options, limit: int
    ) -> tuple[NDArray[np.intp], Ints, dict[int, Floats]]:
        """Amounts of devices [a], lightest options [a, t, m], per sum shares [a, t, m, k, 1]."""
        if id(option) in self._cuts:
            return self._cuts[id(option)]
        amounts = np.unique(option.devices[option.devices <= limit]).astype(np.intp)
        within = option.devices[..., ::-1] <= amounts[:, None, None, None]
        last = np.where(within.any(-1), within.shape[-1] - 1 - within.argmax(-1), -1)
        t, m = (np.arange(size) for size in last.shape[1:])
        shares = {}
        for which in self._sums[0]:
            table = option.shares[which]
            if which == MEMORY:
                some = table[t[:, None], np.minimum(m, table.shape[1] - 1), :, last]
            else:
                some = table[t[:, None], :, last]
            some[last < 0] = np.inf
            shares[which] = some[..., None]
        self._cuts[id(option)] = amounts, last.astype(np.int32), shares
        return self._cuts[id(option)]

    def _group(self, j: int, amount: int, starts: NDArray[np.intp]) -> None:
        after = self._sums[j]
        limit = after[COMPUTE].shape[-1] - 1
        if amount > limit:
            return
        now = after[COMPUTE][..., amount:]
        for i in np.unique(starts[starts >= 0]):
            before = self._sums[i]
            better = before[COMPUTE][..., : limit + 1 - amount] < now
            better &= (starts == i)[..., None, None]
            for which, table in after.items():
                rest = before[which][..., : limit + 1 - amount]
                np.copyto(table[..., amount:], rest, where=better)

    def taken(self, t: int, m: int, k: int, v: int) -> Taken:
        """What the entry at these places of ``sums`` stands for."""
        options: list[int] = [-1] * len(self._options)
        groups = []
        j = len(self._options)
        while j:
            goal = self._sums[j][COMPUTE][t, m, k, v]
            option = self._options[j - 1]
            amounts, last, shares = self._cuts[id(option)]
            some = amounts[amounts <= v]
            before = self._sums[j - 1][COMPUTE][t, m, k, v - some]
            totals = before + shares[COMPUTE][: len(some), t, m, k, 0]
            found = np.flatnonzero(totals == goal)
            if len(found):
                j -= 1
                options[j] = int(last[found[0], t, m])
                v -= int(some[found[0]])
                continue
            i, amount = next(
                (int(starts[t, m]), amount)
                for amount, starts in self._groups.largest[j]
                if starts[t, m] >= 0
                and amount <= v
                and self._sums[int(starts[t, m])][COMPUTE][t, m, k, v - amount] == goal
            )
            groups.append((i, j))
            j, v = i, v - amount
        return Taken(tuple(options), tuple(groups))


def largest_groups(alone: Sequence[Ints], needs: Ints, allowed: Bools) -> Groups:
    """The groups of at least two branches that need fewer devices than the branches on their own.

    Args:
        alone: per branch what it needs on its own: [t, m].
        needs: fewest devices for branches i .. j - 1 as one stage: [j, i, t, m].
    """
    count = len(alone)
    sums = np.cumsum([np.zeros_like(alone[0]), *alone], axis=0, dtype=np.int64)
    useful = (needs < INFINITE) & (needs < sums[:, None] - sums[None]) & allowed
    # One branch on its own is among its ways to be cut.
    useful &= np.tri(count + 1, k=-2, dtype=bool)[:, :, None, None]
    largest: list[tuple[tuple[int, NDArray[np.intp]], ...]] = [()] * (count + 1)
    for j in np.flatnonzero(useful.any(axis=(1, 2, 3))):
        some = np.where(useful[j, :j], needs[j, :j], INFINITE)
        entries = []
        for amount in np.unique(some[some < INFINITE]):
            exact = some == amount
            entries.append((int(amount), np.where(exact.any(axis=0), exact.argmax(axis=0), -1)))
        largest[j] = tuple(entries)
    return Groups(needs, tuple(largest))


def whole(alone: Sequence[Ints], groups: Groups) -> Ints:
    """Fewest devices for the first j branches, nothing of them in an outer stage: [j, t, m]."""
    result = np.zeros((len(alone) + 1, *alone[0].shape), dtype=np.int32)
    t, m = np.ogrid[: alone[0].shape[0], : alone[0].shape[1]]
    for j, needed in enumerate(alone, start=1):
        best = np.minimum(result[j - 1] + needed, INFINITE)
        for amount, starts in groups.largest[j]:
            together = np.where(starts >= 0, result[starts, t, m] + amount, INFINITE)
            best = np.minimum(best, together)
        result[j] = best
    return result
