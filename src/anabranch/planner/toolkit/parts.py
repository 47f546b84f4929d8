"""Parts: stages before they have devices, and their prices.

``toolkit.prices`` states the formulas; ``partitioner.range_prices`` has them for many stages.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from anabranch.cost import CostModel
from anabranch.cost.communication import Port, all_reduce_s
from anabranch.cost.period import period_s, traffic_s, work_s
from anabranch.cost.stage_weights import StageWeights
from anabranch.graph.opgraph import bits
from anabranch.planner.toolkit.prices import MicrobatchPrices
from anabranch.plans.rings import Holder, rings


@dataclass(frozen=True, slots=True)
class Part:
    """A stage to be: its operators as a bit mask; the rest as in ``toolkit.prices.Mode``."""

    mask: int
    replicas: int
    recompute: bool = False
    tensor: int = 1

    @property
    def devices(self) -> int:
        """Number of devices."""
        return self.replicas * self.tensor


@dataclass(frozen=True, slots=True)
class MessagePorts:
    """The ports that messages between two stages use, forward and back.

    Attributes:
        latency: seconds before the first byte is there.
        there: per port its seconds for a byte per sample, and for a byte whatever the samples.
        back: likewise.
    """

    latency: float
    there: tuple[tuple[Port, float, float], ...]
    back: tuple[tuple[Port, float, float], ...]
    ports: set[Port]


class OperatorSets:
    """What sets of operators weigh, whatever the micro-batch size; remembered."""

    def __init__(self, cost: CostModel) -> None:
        self.cost = cost
        self._ops: dict[int, NDArray[np.intp]] = {}
        self._weights: dict[tuple[int, int], StageWeights] = {}
        self._flow: dict[tuple[int, int], tuple[float, float, float, float]] = {}
        self._waits_back: dict[tuple[int, int], bool] = {}

    def ops(self, mask: int) -> NDArray[np.intp]:
        """The operators of a set, ascending."""
        if mask not in self._ops:
            self._ops[mask] = np.fromiter(bits(mask), dtype=np.intp)
        return self._ops[mask]

    def weights(self, mask: int, tensor: int = 1) -> StageWeights:
        """Bytes of the stage with these operators."""
        if (mask, tensor) not in self._weights:
            self._weights[mask, tensor] = self.cost.weights(mask, tensor)
        return self._weights[mask, tensor]

    @cached_property
    def tied(self) -> tuple[tuple[int, int], ...]:
        """Per trainable parameter that several operators read, their mask and its bytes."""
        return tuple(
            (mask, parameter.nbytes)
            for mask, parameter in self.cost.tied
            if parameter.trainable and parameter.nbytes
        )

    def flow(self, source: int, target: int) -> tuple[float, float, float, float]:
        """Bytes from one set of operators to another: forward per sample, fixed; back likewise."""
        if (source, target) not in self._flow:
            sums = [0.0] * 4
            for op in self.ops(source).tolist():
                for i in self.cost.made[op]:
                    if self.cost.readers[i] & target:
                        value = self.cost.graph.values[i]
                        sums[0 if value.batched else 1] += value.nbytes
                        sums[2 if value.batched else 3] += value.nbytes * value.grad
            self._flow[source, target] = (sums[0], sums[1], sums[2], sums[3])
        return self._flow[source, target]

    def waits_back(self, source: int, target: int) -> bool:
        """Whether a backward of the source waits for one of the target: for a gradient, or because
        no value joins the two and the edge is there to order them.
        """
        if (source, target) not in self._waits_back:
            grads = [
                self.cost.graph.values[i].grad
                for op in self.ops(source).tolist()
                for i in self.cost.made[op]
                if self.cost.readers[i] & target
            ]
            self._waits_back[source, target] = any(grads) or not grads
        return self._waits_back[source, target]


class PartPrices:
    """Prices parts at one micro-batch size and remembers them.

    Args:
        sets: their bytes, if several sizes are to share them.
    """

    def __init__(self, microbatch: MicrobatchPrices, sets: OperatorSets | None = None) -> None:
        self.microbatch = microbatch
        self.cost = microbatch.cost
        self.sets = sets or OperatorSets(microbatch.cost)
        self.ways: dict[
            tuple[tuple[int, int, int, int], tuple[int, ...], tuple[int, ...]], MessagePorts
        ] = {}
        self._period_s: dict[Part, float] = {}
        self._compute_s: dict[Part, tuple[float, float]] = {}
        self._headroom: dict[Part, int] = {}

    def compute_s(self, part: Part) -> tuple[float, float]:
        """Forward and backward seconds on the fullest replica, recomputation included."""
        if part not in self._compute_s:
            ops = self.sets.ops(part.mask)
            n = self.microbatch.samples(part.replicas)
            forward, backward = self.cost.op_seconds(n, part.tensor)
            there, back = float(forward[ops].sum()), float(backward[ops].sum())
            self._compute_s[part] = there, back + there * part.recompute
        return self._compute_s[part]

    def seconds(self, part: Part) -> NDArray[np.float64]:
        """Seconds of a micro-batch for every operator of the model, run as this part is."""
        n = self.microbatch.samples(part.replicas)
        forward, backward = self.cost.op_seconds(n, part.tensor)
        return forward * (1 + part.recompute) + backward

    def work_s(self, part: Part) -> float:
        """Seconds of compute or of transfers per micro-batch, whichever is more."""
        border = self.sets.weights(part.mask, part.tensor).border
        price = self.cost.border_price(part.devices)
        traffic = traffic_s(
            border.comes, border.goes, self.microbatch.samples(part.replicas), price
        )
        return float(work_s(sum(self.compute_s(part)), traffic))

    def period_s(self, part: Part) -> float:
        """Seconds from one micro-batch to the next."""
        if part not in self._period_s:
            compute, reduce = sum(self.compute_s(part)), self.reduce_s(part)
            count = self.microbatch.num_microbatches
            self._period_s[part] = float(period_s(self.work_s(part), compute, reduce, count))
        return self._period_s[part]

    def headroom(self, part: Part) -> int:
        """The largest height at which the part fits; -1 if none."""
        if part not in self._headroom:
            weights = self.sets.weights(part.mask, part.tensor)
            height = self.microbatch.headroom(weights, part.replicas, recompute=part.recompute)
            self._headroom[part] = int(height)
        return self._headroom[part]

    def flow(self, source: int, target: int) -> tuple[float, float, float, float]:
        """Bytes from one set of operators to another: forward per sample, fixed; back likewise."""
        return self.sets.flow(source, target)

    def reduce_s(self, part: Part) -> float:
        """Seconds of the all-reduce of a part on devices in a row."""
        price = self.microbatch.ring(part.replicas, part.tensor)
        return float(all_reduce_s(self._reduced_bytes(part), *price))

    def _reduced_bytes(self, part: Part) -> float:
        return float(self.sets.weights(part.mask, part.tensor).summed)

    def all_reduces(
        self, parts: Sequence[Part], devices: Sequence[Sequence[int]]
    ) -> list[tuple[tuple[int, ...], float, float]]:
        """The all-reduces of a step: which parts take part, as indices, bytes and seconds."""
        across: dict[tuple[int, ...], int] = {}
        own = [self._reduced_bytes(part) for part in parts]
        for mask, nbytes in self.sets.tied:
            holders = tuple(s for s, part in enumerate(parts) if part.mask & mask)
            if len(holders) > 1:
                across[holders] = across.get(holders, 0) + nbytes
                for s in holders:
                    own[s] -= math.ceil(nbytes * self._shard(parts[s]))
        found: list[tuple[tuple[int, ...], float, float]] = [
            ((s,), own[s], self.cost.allreduce_s(own[s], devices[s][:: part.tensor]))
            for s, part in enumerate(parts)
            if part.replicas > 1 and own[s] > 0
        ]
        if across:
            held = [
                Holder(where, part.tensor, self._shard(part))
                for part, where in zip(parts, devices, strict=True)
            ]
            for stages, ring, nbytes in rings(across, held):
                found.append((stages, nbytes, self.cost.allreduce_s(nbytes, ring)))
        return found

    def _shard(self, part: Part) -> float:
        """Share of its trainable parameters that each device of a part holds."""
        if part.tensor == 1:
            return 1.0
        whole = self.sets.weights(part.mask).trainable
        return self._reduced_bytes(part) / whole if whole else 0.0


def edges(prices: PartPrices, parts: Iterable[Part]) -> set[tuple[int, int]]:
    """Pairs of parts between which values flow."""
    home = [-1] * len(prices.cost.graph)
    for s, part in enumerate(parts):
        for op in prices.sets.ops(part.mask).tolist():
            home[op] = s
    return {(home[a], home[b]) for a, b in prices.cost.graph.edges if home[a] != home[b]}


def successors(count: int, pairs: Iterable[tuple[int, int]]) -> dict[int, list[int]]:
    """Per part, those to which an edge leads from it."""
    result: dict[int, list[int]] = {s: [] for s in range(count)}
    for x, y in pairs:
        result[x].append(y)
    return result


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
