"""A stage beside a block takes a part of some branches: which leaves least to place?

    a1 --> a2 --> a3 --+
    b1 --> b2 --> b3 --+--> [ join ]        one stage may be { a3, b2, b3, join }

For every branch there are options: cut it at c, so that its remainder needs some number of
devices and its share adds some seconds and bytes to the stage. Several whole branches may also
form a stage of their own (a group), if they stand next to each other in the block. This is a
knapsack with the number of devices as its capacity: over all branches, for every total v, the
least compute. Traffic, all-reduce and memory are carried along with the lightest choice and checked
afterwards.

All arrays are [cap u, height e, degree k, devices v], see ``partitioner.reach``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from anabranch.planner.partitioner.ranges import INFINITE, Bools, Floats, Ints


@dataclass(frozen=True)
class Options:
    """The ways to cut one branch, each with a smaller share of the stage than the one before.

    Attributes:
        devices: what the remainder needs: [u, e, c].
        compute_s: seconds of compute of the share, the all-reduce included if it is spread: [k, c].
        traffic_s: seconds of transfers of the share, likewise: [k, c].
        reduce_s: seconds of all-reduce of the share: [k, c].
        memory: bytes of the share: [u or 1, e or 1, k, c].
    """

    devices: Ints
    compute_s: Floats
    traffic_s: Floats
    reduce_s: Floats
    memory: Floats


@dataclass(frozen=True)
class Taken:
    """Per branch its option, or -1 within a group; and the groups as (first branch, last + 1)."""

    options: tuple[int, ...]
    groups: tuple[tuple[int, int], ...]


class Sharing:
    """The lightest shares of all branches for every total of devices outside the stage.

    Args:
        options: one entry per branch.
        groups: fewest devices for branches i .. j - 1 as one stage: [j, i, e].
        worthwhile: which of these groups to consider: [j, i].
        allowed: where a group is not too high: [u, e].
        limit: most devices.

    Attributes:
        sums: compute, traffic, all-reduce and memory: [4, u, e, k, v].
    """

    def __init__(
        self,
        options: Sequence[Options],
        groups: Ints,
        worthwhile: Bools,
        allowed: Bools,
        limit: int,
    ) -> None:
        self._options = options
        self._groups = groups
        u, e, _ = options[0].devices.shape
        k = len(options[0].compute_s)
        first = np.full((4, u, e, k, limit + 1), np.inf)
        first[..., 0] = 0.0
        self._sums = [first]
        # Per branch: the devices that its option costs, or -1 - i for a group that starts at
        # branch i.
        self._choice: list[Ints] = []
        self._shares: dict[int, list[tuple[int, Floats]]] = {}
        self._allowed = allowed
        for j, option in enumerate(options, start=1):
            self._sums.append(np.empty_like(first))
            self._choice.append(np.empty(first.shape[1:], dtype=np.int32))
            self._cut(option)
            for i in range(j - 1):
                if worthwhile[j, i]:
                    self._group(i, j)
        self.sums = self._sums[-1]

    def _cut(self, option: Options) -> None:
        before, after, choice = self._sums[-2], self._sums[-1], self._choice[-1]
        limit = before.shape[-1] - 1
        cuts = self._cuts(option, limit)
        fewest = cuts[0][0] if cuts else limit + 1
        after[..., :fewest] = np.inf
        for v, share in cuts:
            if v == fewest:
                np.add(before[..., : limit + 1 - v], share, out=after[..., v:])
                choice[...] = v
                continue
            total = before[..., : limit + 1 - v] + share
            better = total[0] < after[0, ..., v:]
            np.copyto(after[..., v:], total, where=better)
            np.copyto(choice[..., v:], v, where=better)

    def _cuts(self, option: Options, limit: int) -> list[tuple[int, Floats]]:
        """Devices that a branch may be given, and the lightest share that this leaves."""
        if id(option) not in self._shares:
            amounts = np.unique(option.devices[option.devices <= limit])
            self._shares[id(option)] = [
                (int(v), self._share(option, int(v))[..., None]) for v in amounts
            ]
        return self._shares[id(option)]

    @staticmethod
    def _last(option: Options, v: int) -> Ints:
        """The lightest option that leaves at most v devices' worth, -1 if none: [u, e]."""
        within = option.devices[..., ::-1] <= v
        count = within.shape[-1]
        return np.where(within.any(-1), count - 1 - within.argmax(-1), -1).astype(np.int32)

    def _share(self, option: Options, v: int) -> Floats:
        """The four sums of that option, infinite if there is none: [4, u, e, k]."""
        cut = self._last(option, v)
        share = np.empty((4, *cut.shape, len(option.compute_s)))
        share[0] = option.compute_s.T[cut]
        share[1] = option.traffic_s.T[cut]
        share[2] = option.reduce_s.T[cut]
        memory = np.broadcast_to(option.memory, (*cut.shape, *option.memory.shape[2:]))
        share[3] = np.take_along_axis(memory, cut[..., None, None], axis=-1)[..., 0]
        share[:, cut < 0] = np.inf
        return share

    def _group(self, i: int, j: int) -> None:
        before, after, choice = self._sums[i], self._sums[j], self._choice[j - 1]
        count = before.shape[-1]
        needed = self._groups[j, i]
        for v in sorted(set(needed[needed < count].tolist())):
            better = before[0, ..., : count - v] < after[0, ..., v:]
            better &= (self._allowed & (needed == v))[..., None, None]
            np.copyto(after[..., v:], before[..., : count - v], where=better)
            np.copyto(choice[..., v:], -1 - i, where=better)

    def taken(self, u: int, e: int, k: int, v: int) -> Taken:
        """What the entry at these places of ``sums`` stands for."""
        options: list[int] = [-1] * len(self._options)
        groups = []
        j = len(self._options)
        while j:
            choice = int(self._choice[j - 1][u, e, k, v])
            if choice >= 0:
                options[j - 1] = int(self._last(self._options[j - 1], choice)[u, e])
                v -= choice
                j -= 1
            else:
                i = -1 - choice
                groups.append((i, j))
                v -= int(self._groups[j, i, e])
                j = i
        assert v == 0, "the devices of all options add up to the total"
        return Taken(tuple(options), tuple(groups))


def worthwhile(alone: Sequence[Ints], groups: Ints) -> Bools:
    """Which groups of at least two branches need fewer devices than the branches on their own.

    Args:
        alone: per branch what it needs on its own: [u, e].
        groups: as for ``Sharing``.
    """
    sums = np.cumsum([np.zeros_like(alone[0]), *alone], axis=0, dtype=np.int64)
    together = groups[:, :, None]
    fewer = (together < INFINITE) & (together < sums[:, None] - sums[None])
    useful = np.asarray(fewer.any(axis=(2, 3)), dtype=bool)
    # One branch on its own is among its ways to be cut.
    useful &= np.tri(len(sums), k=-2, dtype=bool)
    return useful


def whole(alone: Sequence[Ints], groups: Ints, worthwhile: Bools, caps: Ints) -> list[Ints]:
    """Fewest devices for the first j branches, none of them shared with a stage outside the block.

    Args:
        alone: per branch what it needs on its own: [u, e].
        groups: as for ``Sharing``.
        worthwhile: as for ``Sharing``.
        caps: largest height allowed: [u].

    Returns:
        For j = 0 .. number of branches: [u, e].
    """
    allowed = np.arange(alone[0].shape[1])[None, :] <= caps[:, None]
    result = [np.zeros_like(alone[0])]
    for j, needed in enumerate(alone, start=1):
        best = result[j - 1] + needed
        for i in np.flatnonzero(worthwhile[j, :j]):
            together = np.where(allowed, result[i] + groups[j, i], INFINITE)
            best = np.minimum(best, together)
        result.append(np.minimum(best, INFINITE))
    return result
