"""The stage graphs that Algorithm 1 may express, enumerated one by one, and their best."""

import math
from collections.abc import Iterator, Sequence
from functools import cache

from anabranch.planner.graphpipe.chains import ParallelBlock, SeriesChain
from anabranch.planner.toolkit.prices import MicrobatchPrices, Part
from anabranch.plans.edges import mask_edges
from anabranch.plans.stages import heights

Masks = tuple[int, ...]


def partitions(chain: SeriesChain, stop: int | None = None) -> Iterator[Masks]:
    """Partitions of the items of a chain up to ``stop`` into stages."""
    stop = len(chain) if stop is None else stop
    if stop == 0:
        yield ()
    for start in range(stop):
        # The last stage is a run of items,
        last = chain.row.mask(start, stop)
        for before in partitions(chain, start):
            yield (*before, last)
        # or has the tail of one branch of the block before that run,
        block = chain.items[start - 1] if start else None
        if block is not None:
            for q, cut, tail in tails(block):
                for inside in beside(block, {q: cut}):
                    for before in partitions(chain, start - 1):
                        yield (*before, *inside, tail | last)
    # or the last item is a block, with a boundary behind it.
    block = chain.items[stop - 1] if stop else None
    if block is not None:
        for inside in beside(block, {}):
            for before in partitions(chain, stop - 1):
                yield (*before, *inside)


def tails(block: ParallelBlock) -> Iterator[tuple[int, int, int]]:
    """Branches and places to cut them, with the mask of what lies behind."""
    for q, branch in enumerate(block.branches):
        for cut in range(len(branch)):
            yield q, cut, branch.row.mask(cut, len(branch))


def beside(block: ParallelBlock, stops: dict[int, int], start: int = 0) -> Iterator[Masks]:
    """Stages for the branches from ``start`` on, of which some end early."""
    if start == len(block.branches):
        yield ()
        return
    branch = block.branches[start]
    for own in partitions(branch, stops.get(start)):
        for rest in beside(block, stops, start + 1):
            yield (*own, *rest)
    for stop in range(start + 2, len(block.branches) + 1):
        if not any(q in stops for q in range(start, stop)):
            for rest in beside(block, stops, stop):
                yield (block.row.mask(start, stop), *rest)


def least_period(prices: MicrobatchPrices, chain: SeriesChain, devices: int) -> float:
    """The least longest period of them all, on exactly so many devices."""
    degrees = prices.degrees
    least = math.inf
    for masks in set(partitions(chain)):
        if len(masks) > devices:
            continue
        pairs = mask_edges(masks, prices.cost.graph)
        order = _ordered(masks, pairs)
        height = heights(len(masks), {(order[x], order[y]) for x, y in pairs})
        periods = [
            {
                degree: prices.part_period_s(Part(mask, degree))
                for degree in degrees
                if prices.part_headroom(Part(mask, degree)) >= height[order[s]]
            }
            for s, mask in enumerate(masks)
        ]
        least = min(least, _shared_out(periods, devices))
    return least


def _ordered(masks: Sequence[int], pairs: set[tuple[int, int]]) -> dict[int, int]:
    """Stage -> its place in a topological order."""
    order: dict[int, int] = {}
    while len(order) < len(masks):
        free = (s for s in range(len(masks)) if s not in order)
        order[next(s for s in free if all(x in order for x, y in pairs if y == s))] = len(order)
    return order


def _shared_out(periods: Sequence[dict[int, float]], devices: int) -> float:
    """The least longest period with exactly so many devices."""

    @cache
    def best(s: int, left: int) -> float:
        if s == len(periods):
            return 0.0 if left == 0 else math.inf
        ways = (
            max(period, best(s + 1, left - degree))
            for degree, period in periods[s].items()
            if degree <= left
        )
        return min(ways, default=math.inf)

    return best(0, devices)
