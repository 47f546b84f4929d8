"""Stages on exactly all devices, where giving the rest to one stage after the other has failed.

Every device must hold a stage (``plans.check``, C3), and a stage has no use for more replicas
than a micro-batch has samples: 3 operators, 7 devices and micro-batches of 3 samples need 3 stages
with 3, 3 and 1 replicas. So all numbers of replicas that a stage may have are taken together: a
table over the stages has, for each number of devices, the least longest period of the stages so far
on exactly so many. As long as there is no answer, a stage is cut in two: the one that fits in no
way, else the one with the most work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from anabranch.graph.opgraph import bits
from anabranch.planner.toolkit.parts import Part, PartPrices, heights

MOST_CUTS = 8
"""Places at which a run of operators may be cut in two."""

SHORT = 16
"""Models of up to so many operators are cut in any way, not only along one order."""

Arrange = Callable[[Sequence[Part]], tuple[list[Part], set[tuple[int, int]]]]


class Choice(NamedTuple):
    """A way to run a stage: its devices, its period, and the part itself."""

    devices: int
    period_s: float
    part: Part


def fill(
    prices: PartPrices,
    parts: Sequence[Part],
    order: Sequence[int],
    max_replicas: int,
    arrange: Arrange,
) -> list[Part] | None:
    """Parts of the same operators on all devices; None if this finds none.

    Args:
        prices: prices the parts.
        parts: to begin with; some may be cut.
        order: the operators in topological order, by which parts are cut.
        max_replicas: of a stage at most.
        arrange: puts parts in topological order and knows the stage edges.

    Returns:
        The parts, in memory at their heights.
    """
    total = prices.cost.cluster.num_devices
    place = {op: position for position, op in enumerate(order)}
    current = list(parts)
    while True:
        current, pairs = arrange(current)
        height = heights(len(current), pairs)
        choices = [
            ways(prices, part, h, max_replicas) for part, h in zip(current, height, strict=True)
        ]
        found = exactly(choices, total)
        if found is not None:
            return found
        # More stages need more devices in all; fewer than there are stages are never enough.
        cut = [s for s, part in enumerate(current) if part.mask.bit_count() > 1]
        if not cut or len(current) >= total:
            return None
        s = min(cut, key=lambda s: (bool(choices[s]), -sum(prices.compute_s(current[s])), s))
        ops = sorted(bits(current[s].mask), key=place.__getitem__)
        current[s : s + 1] = _halves(prices, current[s], ops)


def ways(prices: PartPrices, part: Part, height: int, max_replicas: int) -> list[Choice]:
    """All ways to run a part that fit at this height, the best for each number of devices."""
    of, total = prices.prices, prices.cost.cluster.num_devices
    best: dict[int, Choice] = {}
    for tensor in sorted({part.tensor, *of.tensors}):
        for replicas in range(1, min(total // tensor, of.microbatch_size, max_replicas) + 1):
            if not of.may(replicas):
                continue
            for recompute in (False, True)[: 1 + of.recompute]:
                one = Part(part.mask, replicas, recompute, tensor)
                if prices.headroom(one) < height:
                    continue
                choice = Choice(one.devices, prices.period_s(one), one)
                known = best.get(one.devices)
                if known is None or choice.period_s < known.period_s:
                    best[one.devices] = choice
                break
    return list(best.values())


def exactly(choices: Sequence[Sequence[Choice]], total: int) -> list[Part] | None:
    """One choice per stage, on ``total`` devices together, with the least longest period."""
    if not all(choices) or sum(max(each)[0] for each in choices) < total:
        return None
    least = np.full(total + 1, np.inf)
    least[0] = 0.0
    taken = []
    for each in choices:
        following, at = np.full(total + 1, np.inf), np.full(total + 1, -1)
        for i, (devices, period_s, _) in enumerate(each):
            if devices > total:
                continue
            longest = np.maximum(least[: total + 1 - devices], period_s)
            better = longest < following[devices:]
            following[devices:][better], at[devices:][better] = longest[better], i
        least = following
        taken.append(at)
    if not np.isfinite(least[total]):
        return None
    left, chosen = total, []
    for each, at in zip(reversed(choices), reversed(taken), strict=True):
        choice = each[at[left]]
        chosen.append(choice.part)
        left -= choice.devices
    return chosen[::-1]


def cuts(prices: PartPrices, part: Part, ops: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Ways to make two stages of a part, as operators of the first and of the second.

    Args:
        prices: prices the part.
        part: what is cut.
        ops: its operators, in topological order.
    """
    seconds = prices.seconds(part)[list(ops)].cumsum()
    # Those whose compute is most even; messages decide among them.
    longer = np.maximum(seconds[:-1], seconds[-1] - seconds[:-1])
    counts = np.sort(np.argsort(longer, kind="stable")[:MOST_CUTS]) + 1
    firsts = [sum(1 << op for op in ops[:count]) for count in counts.tolist()]
    graph = prices.cost.graph
    if len(graph) <= SHORT:
        for op in ops:
            firsts.append(part.mask & (graph.ancestors[op] | 1 << op))
            firsts.append(part.mask & ~(graph.descendants[op] | 1 << op))
    for first in dict.fromkeys(firsts):
        if first and first != part.mask:
            yield first, part.mask & ~first


def _halves(prices: PartPrices, part: Part, ops: Sequence[int]) -> list[Part]:
    """The part cut so that the longer period of the two is least, each run as the part is.

    One device each will not do for a measure: the profile may not cover as many samples.
    """
    both = ([replace(part, mask=mask) for mask in cut] for cut in cuts(prices, part, ops))
    return min(both, key=lambda halves: max(map(prices.period_s, halves)))
