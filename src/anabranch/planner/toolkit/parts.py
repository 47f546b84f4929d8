"""Parts: stages before they have devices, and their prices.

``toolkit.prices`` states the formulas.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from anabranch.graph.opgraph import bits
from anabranch.planner.toolkit.prices import MicrobatchPrices
from anabranch.remembered import remembered


@dataclass(frozen=True, slots=True)
class Part:
    """A stage to be: its operators as a bit mask; the rest as in ``toolkit.prices.Mode``."""

    mask: int
    replicas: int
    recompute: bool = False


class PartPrices:
    """Prices parts at one micro-batch size and remembers them."""

    def __init__(self, microbatch: MicrobatchPrices) -> None:
        self.microbatch = microbatch
        self.cost = microbatch.cost

    def seconds(self, part: Part) -> NDArray[np.float64]:
        """Seconds of a micro-batch for every operator of the model, run as this part is."""
        n = self.microbatch.samples(part.replicas)
        forward, backward = self.cost.op_seconds(n)
        return forward * (1 + part.recompute) + backward

    def compute_s(self, part: Part) -> float:
        """Seconds of a micro-batch on the fullest replica, recomputation included."""
        return float(self.seconds(part)[list(bits(part.mask))].sum())

    @remembered
    def period_s(self, part: Part) -> float:
        """Seconds from one micro-batch to the next."""
        weights = self.cost.weights(part.mask)
        rates = self.microbatch.rates(part.replicas)
        return float(self.microbatch.period_s(weights, self.compute_s(part), rates))

    @remembered
    def headroom(self, part: Part) -> int:
        """The largest height at which the part fits; -1 if none."""
        weights = self.cost.weights(part.mask)
        return int(self.microbatch.headroom(weights, part.replicas, recompute=part.recompute))

    def ways(self, part: Part, most: int) -> Iterator[Part]:
        """The part in every mode with up to ``most`` replicas."""
        prices = self.microbatch
        for replicas in filter(prices.may, range(1, most + 1)):
            for recompute in (False, True)[: 1 + prices.recompute]:
                yield Part(part.mask, replicas, recompute)


def heights(count: int, pairs: set[tuple[int, int]]) -> list[int]:
    """Longest distance of each part to a sink; ``pairs`` run from lower to higher indices."""
    result = [0] * count
    for x, y in sorted(pairs, reverse=True):
        result[x] = max(result[x], result[y] + 1)
    return result


def fits(prices: PartPrices, parts: Sequence[Part], pairs: set[tuple[int, int]]) -> bool:
    """Return True if every part has memory for its height."""
    height = heights(len(parts), pairs)
    return all(prices.headroom(part) >= h for part, h in zip(parts, height, strict=True))
