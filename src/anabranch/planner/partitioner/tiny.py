"""Every partition of a model of a few operators, on exactly all devices.

The searches under a bound on the period know numbers of replicas that are powers of two and look
for the fewest devices. In a model of three operators on seven devices that says little: what counts
is how all devices are used, and there are few ways. So all partitions are looked at, at all
micro-batch sizes: first by what no plan of such stages can be quicker than, then, those that look
best, with the numbers of replicas that make the longest period shortest (``partitioner.fill``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from anabranch.planner.partitioner.fill import Choice, exactly, ways
from anabranch.planner.partitioner.problem import Problem
from anabranch.planner.partitions import partitions
from anabranch.planner.toolkit.assemble import Candidate
from anabranch.planner.toolkit.parts import Part, PartPrices, heights
from anabranch.planner.toolkit.prices import microbatch_sizes

MOST_OPERATORS = 8
"""At most 4,140 partitions."""

MOST_TRIED = 400
"""Partitions and micro-batch sizes, the likeliest first, that get replicas and a place."""

HOPELESS = 1.2
"""None of those that cannot be within this factor of a step that is known."""


def tiny(
    problem: Problem,
    microbatch_size: int | None,
    found: Sequence[Candidate] = (),
    *,
    known_s: float = float("inf"),
) -> Iterator[Candidate]:
    """Candidates, the likeliest first; none for a larger model, or if nothing fits.

    Args:
        problem: what is to be planned.
        microbatch_size: only this size; None for all.
        found: candidates so far.
        known_s: a step that is known to be possible.
    """
    cost = problem.cost
    known_s = min((each.step_s for each in found), default=known_s)
    if len(cost.graph) > MOST_OPERATORS:
        return
    every = [each for each in partitions(cost) if len(each[0]) <= cost.cluster.num_devices]
    sizes = [microbatch_size] if microbatch_size else microbatch_sizes(problem.batch_size)
    jobs: list[tuple[float, int, list[list[Choice]]]] = []
    for size in sizes:
        prices = problem.assembler(problem.prices(size)).prices
        known: dict[tuple[int, int], list[Choice]] = {}
        for masks, pairs in every:
            height = heights(len(masks), pairs)
            for key in zip(masks, height, strict=True):
                if key not in known:
                    known[key] = ways(prices, Part(key[0], 1), key[1], problem.max_replicas)
            choices = [known[key] for key in zip(masks, height, strict=True)]
            if all(choices):
                likely_s, least_s = _rough_s(prices, choices, pairs)
                if least_s <= HOPELESS * known_s:
                    jobs.append((likely_s, size, choices))
    jobs.sort(key=lambda job: job[0])
    for _, size, choices in jobs[:MOST_TRIED]:
        parts = exactly(choices, cost.cluster.num_devices)
        if parts is not None:
            candidate = problem.assembler(problem.prices(size)).assemble(parts)
            if candidate is not None:
                yield candidate


def _rough_s(
    prices: PartPrices, choices: Sequence[Sequence[Choice]], pairs: set[tuple[int, int]]
) -> tuple[float, float]:
    """Seconds of compute of a step, with the way through the stages and back, and without.

    No step of these stages is shorter than the latter, whatever their replicas are.
    """
    least = [min(sum(prices.compute_s(c.part)) for c in each) for each in choices]
    way = list(least)
    for x, y in sorted(pairs, reverse=True):
        way[x] = max(way[x], least[x] + way[y])
    count = prices.prices.num_microbatches
    return (count - 1) * max(least) + max(way), count * max(least)
