"""Stages next to a block that take a part of its branches: which part, and the fewest devices.

The stages are runs of operators behind the block (or before it), each at some cap and height.
Caps and heights for which the block needs the same are one state, looked at once.

Where a bound spreads the all-reduce over the micro-batches, all of it is spread here, as if no
backward hid any, so that a stage's seconds are the sum of those of its parts.

Arrays are [bound t, cap w, height h], [bound t, state m] or [range q, ...].
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from anabranch.planner.partitioner.branch_shares import (
    COMPUTE,
    MEMORY,
    REDUCE,
    TRAFFIC,
    BranchShares,
    Groups,
    Options,
    largest_groups,
)
from anabranch.planner.partitioner.chains import Block
from anabranch.planner.partitioner.limits import SEARCH
from anabranch.planner.partitioner.range_prices import (
    INFINITE,
    Bools,
    Floats,
    Ints,
    RangePrices,
    RangeSizes,
    Shares,
)
from anabranch.planner.toolkit.prices import Bound


class Limits:
    """The bounds of one call, as arrays over them.

    Attributes:
        at: place of the micro-batch size: [t].
        period_s, reduce_s: of the bound: [t].
        spread: what part of an all-reduce counts for each micro-batch: [t].
        count: micro-batches: [t].
    """

    def __init__(self, sizes: RangeSizes, bounds: Sequence[Bound]) -> None:
        self.sizes = sizes
        self.bounds = tuple(bounds)
        self.at: NDArray[np.intp] = np.array([bound.at for bound in bounds], dtype=np.intp)
        self.period_s = np.array([bound.period_s for bound in bounds])
        self.reduce_s = np.array([bound.reduce_s for bound in bounds])
        self.count = sizes.count[self.at]
        self.spread = 1 / self.count * bounds[0].spread

    def per_bound(
        self, compute: Floats, traffic: Floats, reduce_s: Floats
    ) -> tuple[Floats, Floats, Floats]:
        """Seconds of [s, k, ...] and [k, ...] under every bound: [t, k, ...]."""
        spread = self.spread.reshape(-1, *(1,) * reduce_s.ndim) * reduce_s
        every = np.broadcast_to(reduce_s, spread.shape)
        return compute[self.at] + spread, traffic[self.at] + spread, every


@dataclass(frozen=True)
class Stages:
    """Ranges of a chain, each of which may become a stage with a part of the block.

    Attributes:
        seconds: compute, traffic and all-reduce, spread included: [t, k, q] each.
        fixed, per_microbatch: bytes of memory: [t, k, q].
    """

    seconds: tuple[Floats, Floats, Floats]
    fixed: Floats
    per_microbatch: Floats

    @staticmethod
    def of(ranges: RangePrices, runs: Sequence[tuple[int, int]], limits: Limits) -> Stages:
        """Prices of ranges (start, stop)."""
        at = tuple(np.array(runs).T)
        seconds = limits.per_bound(ranges.compute_s(at), ranges.traffic_s(at), ranges.reduce_s(at))
        seconds[COMPUTE][~limits.sizes.valid[limits.at]] = np.inf
        memory = ranges.memory(at)
        fits = memory.at_the_end <= limits.sizes.memory_bytes
        fixed = np.where(fits, memory.fixed, np.inf)[limits.at]
        fixed[~limits.sizes.valid[limits.at]] = np.inf
        return Stages(seconds, fixed, memory.flight[limits.at])


@dataclass(frozen=True)
class OptionWeights:
    """What a stage gains by each option of a branch, under every bound.

    Attributes:
        seconds: compute, traffic and all-reduce, spread included: [t, k, c] each.
        fixed, per_microbatch: bytes of memory: [t, k, c].
    """

    seconds: tuple[Floats, Floats, Floats]
    fixed: Floats
    per_microbatch: Floats

    @staticmethod
    def of(shares: Shares, limits: Limits) -> OptionWeights:
        """Those of some shares."""
        return OptionWeights(
            limits.per_bound(shares.compute_s, shares.traffic_s, shares.reduce_s),
            shares.fixed[limits.at],
            shares.per_microbatch[limits.at],
        )

    def memory(self, held: Floats) -> Floats:
        """Bytes for some numbers in flight [t, m]: [t, m, k, c]."""
        return self.fixed[:, None] + held[..., None, None] * self.per_microbatch[:, None]


@dataclass(frozen=True)
class SharedStages:
    """What stages next to a block take of it.

    Attributes:
        sharing: the lightest shares.
        place: for every cap and height the state in ``sharing``: [w, h].
        needs: fewest devices, those of the stage included: [q, t, w, h].
        mode: for these, the place of the stage's mode: [q, t, w, h].
        total: and the devices of the branches' remainders: [q, t, w, h].
    """

    sharing: BranchShares
    place: NDArray[np.intp]
    needs: Ints
    mode: Ints
    total: Ints


@dataclass(frozen=True)
class BlockNeighbour:
    """A block as the stages next to it see it.

    Attributes:
        devices: class -> what is left of a branch for each of its options: [t, w, h, c].
        shares: class -> what a stage gains by each option.
        groups: fewest devices for branches i .. j - 1 as one stage: [j, i, t, h].
        allowed: where a group is not too high: [w, h].
    """

    block: Block
    devices: Mapping[int, Ints]
    shares: Mapping[int, Shares]
    groups: Ints
    allowed: Bools
    heights: Ints

    def share(self, stages: Stages, limits: Limits, limit: int) -> SharedStages:
        """What the stages take, on at most ``limit`` devices."""
        weights = {k: OptionWeights.of(shares, limits) for k, shares in self.shares.items()}
        most_held = np.minimum(self.heights.max() + 1, limits.count)[:, None, None]
        carried = self._carried(stages, weights, limits, most_held)
        states, place = self._states(by_height=MEMORY in carried)
        held = np.minimum(self.heights.reshape(-1)[states] + 1, limits.count[:, None])
        options = {
            k: Options(
                devices.reshape(len(limits.at), -1, devices.shape[-1])[:, states],
                (*weights[k].seconds, weights[k].memory(held)),
            )
            for k, devices in self.devices.items()
        }
        groups = self._groups(options, states)
        most = sum(_largest(options[k].devices) for k in self.block.classes)
        most += (len(self.block.classes) // 2) * max(
            (amount for group in groups.largest for amount, _ in group), default=0
        )
        sharing = BranchShares(
            [options[k] for k in self.block.classes], groups, min(limit, most), carried
        )
        needs, mode, total = (t[..., place] for t in _fewest(sharing, stages, limits, held))
        return SharedStages(sharing, place, needs, mode, total)

    def _carried(
        self,
        stages: Stages,
        weights: Mapping[int, OptionWeights],
        limits: Limits,
        held: Floats,
    ) -> list[int]:
        """The sums that may exceed their limits if all branches take what is heaviest."""
        often = Counter(self.block.classes)

        def heaviest(of: Callable[[OptionWeights], Floats]) -> Floats:
            """What all branches add at most: [t, k]."""
            tables = [np.maximum(of(weights[k]).max(axis=-1), 0.0) * n for k, n in often.items()]
            return np.asarray(np.sum(tables, axis=0))

        quick = stages.seconds[COMPUTE] <= limits.period_s[:, None, None]

        def exceeds(base: Floats, which: Floats, limit: Floats | float) -> bool:
            return bool((quick & (base + which[..., None] > limit)).any())

        fixed, per_microbatch = heaviest(lambda w: w.fixed), heaviest(lambda w: w.per_microbatch)
        memory = fixed + held[..., 0] * per_microbatch
        traffic = heaviest(lambda w: w.seconds[TRAFFIC])
        reduce_s = heaviest(lambda w: w.seconds[REDUCE])
        base = stages.fixed + held * stages.per_microbatch
        found = [COMPUTE]
        if exceeds(stages.seconds[TRAFFIC], traffic, limits.period_s[:, None, None]):
            found.append(TRAFFIC)
        if exceeds(stages.seconds[REDUCE], reduce_s, limits.reduce_s[:, None, None]):
            found.append(REDUCE)
        if exceeds(base, memory, limits.sizes.memory_bytes):
            found.append(MEMORY)
        return found

    def _states(self, *, by_height: bool) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """States as places in [w, h] flattened, and the state of every cap and height.

        Memory rises with the height, and is taken at the greatest of a state. So that this loses
        little, a state ends where the height doubles, and a few heights are told apart.
        """
        caps, heights = self.heights.shape
        if caps * heights == 1:
            return np.zeros(1, dtype=np.intp), np.zeros((1, 1), dtype=np.intp)
        few = len(np.unique(self.heights)) <= SEARCH.heights_apart
        groups = [self.groups[..., h].tobytes() for h in range(heights)]
        keys: dict[tuple[object, ...], int] = {}
        states: list[int] = []
        place = np.empty((caps, heights), dtype=np.intp)
        for w, h in np.ndindex(caps, heights):
            height = int(self.heights[w, h])
            level = (height if few else height.bit_length()) if by_height else 0
            tables = b"".join(table[:, w, h].tobytes() for table in self.devices.values())
            key = level, tables, groups[h], bool(self.allowed[w, h])
            m = place[w, h] = keys.setdefault(key, len(keys))
            if m == len(states):
                states.append(w * heights + h)
            elif height > self.heights.reshape(-1)[states[m]]:
                states[m] = w * heights + h
        return np.array(states, dtype=np.intp), place

    def _groups(self, options: Mapping[int, Options], states: NDArray[np.intp]) -> Groups:
        # Alone a branch needs what it does if nothing of it is taken: the last option.
        alone = [options[k].devices[..., -1] for k in self.block.classes]
        heights = states % self.heights.shape[1]
        return largest_groups(alone, self.groups[..., heights], self.allowed.reshape(-1)[states])


def _fewest(
    sharing: BranchShares, stages: Stages, limits: Limits, held: Floats
) -> tuple[Ints, Ints, Ints]:
    """The best shares to go with each of some ranges, as ``share`` returns it: [q, t, m]."""
    count = stages.fixed.shape[-1]
    step = max(1, SEARCH.ranges_at_once // sharing.sums[COMPUTE].size)
    parts = [
        _fewest_of(sharing, stages, slice(q, q + step), limits, held) for q in range(0, count, step)
    ]
    needs, modes, totals = (np.concatenate(column) for column in zip(*parts, strict=True))
    return needs, modes, totals


def _fewest_of(
    sharing: BranchShares, stages: Stages, some: slice, limits: Limits, held: Floats
) -> tuple[Ints, Ints, Ints]:
    def of(table: Floats) -> Floats:
        """[t, k, q] as [q, t, 1, k, 1]."""
        return table[..., some].transpose(2, 0, 1)[:, :, None, :, None]

    period_s = limits.period_s[:, None, None, None]
    fits: Bools = sharing.sums[COMPUTE] + of(stages.seconds[COMPUTE]) <= period_s
    if TRAFFIC in sharing.sums:
        fits &= sharing.sums[TRAFFIC] + of(stages.seconds[TRAFFIC]) <= period_s
    if REDUCE in sharing.sums:
        longest = limits.reduce_s[:, None, None, None]
        fits &= sharing.sums[REDUCE] + of(stages.seconds[REDUCE]) <= longest
    if MEMORY in sharing.sums:
        bytes_ = of(stages.fixed) + held[..., None, None] * of(stages.per_microbatch)
        fits &= sharing.sums[MEMORY] + bytes_ <= limits.sizes.memory_bytes
    total = fits.argmax(axis=-1).astype(np.int32)
    needs = np.where(fits.any(axis=-1), total + limits.sizes.devices, INFINITE).astype(np.int32)
    k = needs.argmin(axis=-1).astype(np.int32)
    best = k[..., None]
    return (
        np.take_along_axis(needs, best, axis=-1)[..., 0],
        k,
        np.take_along_axis(total, best, axis=-1)[..., 0],
    )


def _largest(devices: Ints) -> int:
    """The most that is not infinite."""
    finite = devices[devices < INFINITE]
    return int(finite.max()) if finite.size else 0
