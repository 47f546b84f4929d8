"""Bounds on the period, many at once: which suffice, and with which stages.

A bound is first tried as if every stage were at the sink, which is a cheap lower limit whose stages
often fit. Where they do not, the bounds from there on are tried with all heights, and where that
costs more than ``SEARCH.dearer``, once more with recomputation.

Small models are looked at for several micro-batch sizes in one go, to spare NumPy calls; in large
ones tables are made one after the other, no more than are needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from anabranch.planner.partitioner.chain_programme import ChainProgramme
from anabranch.planner.partitioner.chains import Block, Chain
from anabranch.planner.partitioner.limits import SEARCH
from anabranch.planner.toolkit.assemble import Candidate
from anabranch.planner.toolkit.parts import Part, fits
from anabranch.planner.toolkit.prices import Bound, MicrobatchPrices
from anabranch.planner.toolkit.problem import Problem


@dataclass(eq=False)
class Size:
    """One micro-batch size.

    Attributes:
        least_s: no period is shorter.
        pool, at: where its tables are.
        low: a bound on the period under which there are too few devices.
        high: one under which there are enough; infinite if none is known.
        parts: the stages under ``high``.
        recompute: whether those may recompute.
        found: candidates so far.
        seen: the stages that became candidates, or failed to.
    """

    prices: MicrobatchPrices
    least_s: float
    pool: int = 0
    at: int = 0
    low: float = 0.0
    high: float = float("inf")
    parts: list[Part] = field(default_factory=list)
    recompute: bool = False
    found: list[Candidate] = field(default_factory=list)
    seen: set[frozenset[Part]] = field(default_factory=set)

    @property
    def count(self) -> int:
        """Micro-batches of a step."""
        return self.prices.num_microbatches

    @property
    def outline_s(self) -> float:
        """No step of two stages in a row is shorter, as far as is known."""
        return (self.count + 1) * self.low

    @property
    def best_s(self) -> float:
        """The least estimated step so far."""
        return min((candidate.step_s for candidate in self.found), default=float("inf"))

    def between(self, steps: int) -> list[float]:
        """Periods from above low to high, evenly spaced in ratio."""
        top = min(self.high, SEARCH.top * self.low)
        periods = [self.low * (top / self.low) ** (i / steps) for i in range(1, steps)]
        return [*periods, self.high]

    def bounds(self, periods: Iterable[float], template: Bound) -> list[Bound]:
        """Bounds for this size."""
        return [replace(template, period_s=period, at=self.at) for period in periods]


Job = tuple[Size, Sequence[Bound]]
"""A size and bounds for it, ascending."""


@dataclass(frozen=True)
class BoundsTable:
    """Bounds of a size, ascending, and the first that suffices if every stage were at the sink.

    Attributes:
        first: place of the first that suffices.
    """

    size: Size
    bounds: Sequence[Bound]
    first: int
    stages: Callable[[], list[Part]]

    @property
    def outline_s(self) -> float:
        """About what a step takes if the way there and back is that of a few stages."""
        return (self.size.count + 3) * self.bounds[self.first].period_s


class PeriodBounds:
    """Makes the tables of one problem.

    Args:
        sizes: micro-batch sizes, the most promising first; they are put into pools.

    Attributes:
        pools: sizes that are looked at together.
        is_large: tables are made one after the other.
    """

    def __init__(self, problem: Problem, chain: Chain, sizes: Sequence[Size]) -> None:
        self._problem = problem
        self._chain = chain
        self._devices = problem.cost.cluster.num_devices
        modes = max((len(size.prices.degrees) for size in sizes), default=1)
        ranges, sharing = entries(chain, modes, self._devices)
        self.is_large = ranges + sharing > SEARCH.entries_of_large * len(problem.order)
        self._at_once = max(1, int(SEARCH.entries_at_once / (ranges + sharing)))
        together = 1 if self.is_large else SEARCH.sizes_together
        self.pools = [sizes[i : i + together] for i in range(0, len(sizes), together)]
        for pool, some in enumerate(self.pools):
            for at, size in enumerate(some):
                size.pool, size.at = pool, at
        self._reaches: dict[tuple[int, bool], ChainProgramme] = {}

    def _reach(self, size: Size) -> ChainProgramme:
        key = size.pool, size.recompute
        if key not in self._reaches:
            if self.is_large:
                self._reaches.clear()
            prices = [
                replace(pooled.prices, recompute=size.recompute) for pooled in self.pools[size.pool]
            ]
            self._reaches[key] = ChainProgramme(self._chain, prices, limit=self._devices)
        return self._reaches[key]

    def lightly(self, jobs: Sequence[Job]) -> list[BoundsTable]:
        """Tables of sizes for which some bound suffices at the sink; sets their low and high."""
        result: list[BoundsTable] = []
        for together in self._together(jobs):
            if not self.is_large:
                result += self._at_a_time(together)
            for size, bounds in together if self.is_large else []:
                result += self._one_by_one(size, bounds)
        return result

    @staticmethod
    def _together(jobs: Sequence[Job]) -> list[list[Job]]:
        groups: dict[tuple[int, bool], list[Job]] = {}
        for size, bounds in jobs:
            if bounds:
                groups.setdefault((size.pool, size.recompute), []).append((size, bounds))
        return list(groups.values())

    def _at_a_time(self, jobs: Sequence[Job]) -> Iterator[BoundsTable]:
        found = self._reach(jobs[0][0]).lightly([bound for _, some in jobs for bound in some])
        start = 0
        for size, bounds in jobs:
            devices = found.devices[start : start + len(bounds), 0]
            first = next((i for i, count in enumerate(devices) if count <= self._devices), None)
            self._note(size, bounds, first)
            if first is not None:
                yield BoundsTable(size, bounds, first, partial(found.parts, start + first))
            start += len(bounds)

    def _one_by_one(self, size: Size, bounds: Sequence[Bound]) -> Iterator[BoundsTable]:
        """By bisection: what suffices does so under every greater bound."""
        reach = self._reach(size)
        low, high = 0, len(bounds)
        parts: list[Part] = []
        while low < high:
            middle = (low + high) // 2
            found = reach.lightly([bounds[middle]])
            if found.devices[0, 0] <= self._devices:
                # Large tables are not kept.
                high, parts = middle, found.parts(0)
            else:
                low = middle + 1
        self._note(size, bounds, high if parts else None)
        if parts:
            yield BoundsTable(size, bounds, high, partial(list, parts))

    @staticmethod
    def _note(size: Size, bounds: Sequence[Bound], first: int | None) -> None:
        last = len(bounds) - 1 if first is None else first - 1
        if last >= 0:
            size.low = max(size.low, bounds[last].period_s)
        if first is not None:
            size.high = bounds[first].period_s

    def settle(self, table: BoundsTable) -> None:
        """Set high and parts of a size to the first bound that suffices, memory and all."""
        size, bounds = table.size, table.bounds
        place, parts, recompute = table.first, table.stages(), size.recompute
        if not self._fits(size, parts):
            place, parts, recompute = self._heavily(size, bounds, place)
        if place > table.first:
            size.low = bounds[place - 1].period_s
        size.high = bounds[place].period_s if parts else np.inf
        size.parts, size.recompute = parts, recompute

    def _fits(self, size: Size, parts: Sequence[Part]) -> bool:
        assembler = self._problem.assembler(size.prices.microbatch_size)
        arranged, pairs = assembler.arrange(parts)
        return fits(assembler.prices, arranged, pairs)

    def _heavily(
        self, size: Size, bounds: Sequence[Bound], first: int
    ) -> tuple[int, list[Part], bool]:
        """The first bound from a place on that suffices with all heights.

        Returns:
            Its place, the stages (none if no bound suffices), and whether they may recompute.
        """
        place, parts = self._with_heights(size, bounds, first)
        dear = not parts or bounds[place].period_s > SEARCH.dearer * bounds[first].period_s
        if self._problem.recompute and not size.recompute and dear:
            again = replace(size, recompute=True)
            other, its_parts = self._with_heights(again, bounds[: place + 1], first)
            if its_parts and (not parts or other < place):
                return other, its_parts, True
        return place, parts, size.recompute

    def _with_heights(
        self, size: Size, bounds: Sequence[Bound], first: int
    ) -> tuple[int, list[Part]]:
        reach = self._reach(size)
        step = max(1, self._at_once // min(reach.heights, size.count))
        for start in range(first, len(bounds), step):
            found = reach.solve(bounds[start : start + step])
            enough = np.flatnonzero(found.devices[:, 0] <= self._devices)
            if len(enough):
                return start + int(enough[0]), found.parts(int(enough[0]))
        return len(bounds) - 1, []

    def room(self, caps: Sequence[int]) -> int:
        """Bounds that can be looked at together for several caps on the height."""
        return self._at_once // (len(caps) * (max(caps) + 1))

    def shallowest(
        self, jobs: Sequence[Job], caps: Sequence[int]
    ) -> Iterator[tuple[Size, list[Part]]]:
        """For bounds from the least up, stages of ever smaller depth; caps ascend."""
        step = max(1, self.room(caps))
        for together in self._together(jobs):
            bounds = [bound for _, some in together for bound in some]
            owners = [size for size, some in together for _ in some]
            least = {id(size): len(caps) for size in owners}
            fewest = {id(size): self._devices + 1 for size in owners}
            for start in range(0, len(bounds), step):
                found = self._reach(owners[0]).solve(bounds[start : start + step], caps)
                for t, devices in enumerate(found.devices):
                    size = owners[start + t]
                    if fewest[id(size)] > devices[-1]:
                        # Whatever the depth, with fewer devices than before.
                        fewest[id(size)] = int(devices[-1])
                        yield size, found.parts(t, len(caps) - 1)
                    enough = np.flatnonzero(devices[: least[id(size)]] <= self._devices)
                    if len(enough):
                        least[id(size)] = int(enough[0])
                        yield size, found.parts(t, int(enough[0]))


def least_period(prices: MicrobatchPrices) -> float:
    """A lower limit: all work shared out evenly, and no less than the longest operator."""
    work = longest = float("inf")
    for mode in prices.modes:
        seconds = sum(prices.cost.op_seconds(prices.samples(mode.replicas), mode.tensor))
        work = min(work, float(np.sum(seconds)) * mode.devices)
        longest = min(longest, float(np.max(seconds)))
    return max(1e-12, work / prices.cost.cluster.num_devices, longest) * (1 - 1e-9)


def entries(chain: Chain, modes: int, devices: float) -> tuple[float, float]:
    """About how many entries the tables of a model have per bound: of ranges, of shares."""
    ranges, sharing = len(chain.row) ** 2.0, 0.0
    weight = sum(mask.bit_count() for mask in chain.row.parts)
    for item, mask in zip(chain.items, chain.row.parts, strict=True):
        if isinstance(item, Block):
            some = devices * mask.bit_count() / weight
            ranges += len(item.row) ** 2
            sharing += len(item.row) * modes * (some + 1)
            for k in set(item.classes):
                part = some * item.row.parts[k].bit_count() / mask.bit_count()
                inner = entries(item.branches[k], modes, part)
                ranges, sharing = ranges + inner[0], sharing + inner[1]
    return ranges, sharing
