"""Parts: stages to be, before they have devices, and their prices, whatever operators they hold.

The same formulas as ``partitioner.ranges``, for any set of operators; ``partitioner.prices`` states
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from anabranch.graph.opgraph import bits
from anabranch.planner.partitioner.prices import Prices


@dataclass(frozen=True, slots=True)
class Part:
    """A stage to be.

    Attributes:
        mask: its operators.
        replicas: slices of each micro-batch.
        recompute: run the forward again in the backward instead of keeping its insides.
        tensor: devices of each replica.
    """

    mask: int
    replicas: int
    recompute: bool = False
    tensor: int = 1

    @property
    def devices(self) -> int:
        """Number of devices."""
        return self.replicas * self.tensor


class PartPrices:
    """Prices parts at one micro-batch size and remembers them."""

    def __init__(self, prices: Prices) -> None:
        self.prices = prices
        self.cost = prices.cost
        self._period_s: dict[Part, float] = {}
        self._compute_s: dict[Part, tuple[float, float]] = {}
        self._headroom: dict[Part, int] = {}
        self._flow: dict[tuple[int, int], tuple[float, float, float, float]] = {}
        self._reduced: dict[tuple[int, int], int] = {}

    def compute_s(self, part: Part) -> tuple[float, float]:
        """Forward and backward seconds on the fullest replica, recomputation included."""
        if part not in self._compute_s:
            ops = list(bits(part.mask))
            n = self.prices.samples(part.replicas)
            forward, backward = self.cost.op_seconds(n, part.tensor)
            there, back = float(forward[ops].sum()), float(backward[ops].sum())
            self._compute_s[part] = there, back + there * part.recompute
        return self._compute_s[part]

    def period_s(self, part: Part) -> float:
        """Seconds from one micro-batch to the next."""
        if part not in self._period_s:
            enter, leave = self._border(part)
            self._period_s[part] = float(
                self.prices.period_s(
                    sum(self.compute_s(part)),
                    enter,
                    leave,
                    self._reduced_bytes(part),
                    part.replicas,
                    part.tensor,
                )
            )
        return self._period_s[part]

    def _border(self, part: Part) -> tuple[float, float]:
        """Bytes that come in and go out per micro-batch on the fullest replica, gradients too."""
        values = self.cost.graph.values
        enter = leave = 0.0
        n = self.prices.samples(part.replicas)
        for i in {i for op in bits(part.mask) for i in self.cost.read[op]}:
            if not part.mask >> values[i].producer & 1:
                enter += values[i].size(n)
                leave += values[i].size(n) * values[i].grad
        for i in (i for op in bits(part.mask) for i in self.cost.made[op]):
            if self.cost.readers[i] & ~part.mask:
                leave += values[i].size(n)
                enter += values[i].size(n) * values[i].grad
        return enter, leave

    def headroom(self, part: Part) -> int:
        """The largest height at which the part fits; -1 if none."""
        if part not in self._headroom:
            none, one = (self._bytes(part, in_flight) for in_flight in (0, 1))
            self._headroom[part] = int(
                self.prices.headroom(np.float64(none), np.float64(one - none))
            )
        return self._headroom[part]

    def _bytes(self, part: Part, in_flight: int) -> float:
        return self.cost.device_bytes(
            bits(part.mask),
            microbatch_size=self.prices.samples(part.replicas) * part.replicas,
            replicas=part.replicas,
            in_flight=in_flight,
            recompute=part.recompute,
            tensor=part.tensor,
        )

    def flow(self, source: int, target: int) -> tuple[float, float, float, float]:
        """Bytes from one set of operators to another: forward per sample, fixed; back likewise."""
        if (source, target) not in self._flow:
            sums = [0.0] * 4
            for i in self.cost.crossing(source, target):
                value = self.cost.graph.values[i]
                sums[0 if value.batched else 1] += value.nbytes
                sums[2 if value.batched else 3] += value.nbytes * value.grad
            self._flow[source, target] = (sums[0], sums[1], sums[2], sums[3])
        return self._flow[source, target]

    def reduce_s(self, part: Part) -> float:
        """Seconds of the all-reduce of a part on devices in a row."""
        return float(self.prices.allreduce_s(self._reduced_bytes(part), part.replicas, part.tensor))

    def _reduced_bytes(self, part: Part) -> int:
        key = part.mask, part.tensor
        if key not in self._reduced:
            self._reduced[key] = self.cost.parameter_bytes(
                bits(part.mask), trainable=True, tensor=part.tensor
            )
        return self._reduced[key]

    def allreduce_s(self, part: Part, devices: Sequence[int]) -> float:
        """Seconds of the all-reduce of a part on these devices."""
        if part.replicas == 1:
            return 0.0
        return self.cost.allreduce_s(self._reduced_bytes(part), devices[:: part.tensor])


def edges(prices: PartPrices, parts: Sequence[Part]) -> set[tuple[int, int]]:
    """Pairs of parts between which values flow."""
    home = {op: s for s, part in enumerate(parts) for op in bits(part.mask)}
    pairs = {(home[a], home[b]) for a, b in prices.cost.graph.edges}
    return {(x, y) for x, y in pairs if x != y}


def heights(count: int, pairs: set[tuple[int, int]]) -> list[int]:
    """Longest distance of each part to a sink; ``pairs`` run from lower to higher indices."""
    result = [0] * count
    for x, y in sorted(pairs, reverse=True):
        result[x] = max(result[x], result[y] + 1)
    return result


def fits(prices: PartPrices, parts: Sequence[Part], pairs: set[tuple[int, int]]) -> bool:
    """Whether every part has memory for its height."""
    height = heights(len(parts), pairs)
    return all(prices.headroom(part) >= h for part, h in zip(parts, height, strict=True))
