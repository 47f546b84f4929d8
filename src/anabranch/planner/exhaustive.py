"""Every partition of a small model: the yardstick for the planners that are clever.

All partitions of up to ``MOST_OPERATORS`` operators into stages with an acyclic stage graph
(4,140 partitions of 8 operators before that condition), every micro-batch size, and for each the
numbers of replicas that give the least longest period within the devices and their memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from anabranch.cost import CostModel
from anabranch.errors import InfeasiblePlanError
from anabranch.graph.cuts import decompose, operators
from anabranch.planner.infeasible import explain, require_sizes
from anabranch.planner.partitioner.assemble import Assembler, Candidate
from anabranch.planner.partitioner.chains import build
from anabranch.planner.partitioner.parts import Part, PartPrices, edges, heights
from anabranch.planner.partitioner.prices import Prices, degrees, microbatch_sizes
from anabranch.planner.partitioner.search import Problem, best
from anabranch.planner.stages import StageGraph

MOST_OPERATORS = 8
MOST_DEVICES = 64


@dataclass(frozen=True)
class Exhaustive:
    """Tries every partition, with replicas in powers of two.

    Attributes:
        max_replicas: devices per stage at most. None: no limit.
        candidates: stage graphs to propose at most.
    """

    max_replicas: int | None = None
    candidates: int = 24

    schedules: ClassVar[tuple[str, ...]] = ("1f1b", "1f1b-deep")

    def __call__(
        self, cost: CostModel, *, batch_size: int, microbatch_size: int | None = None
    ) -> list[StageGraph]:
        """Propose stage graphs, the least estimated step first; see ``planner.base``.

        Raises:
            InfeasiblePlanError: if the model or the cluster is too large, or nothing fits.
        """
        total = cost.cluster.num_devices
        if len(cost.graph) > MOST_OPERATORS or total > MOST_DEVICES:
            raise InfeasiblePlanError(
                f"planner exhaustive takes up to {MOST_OPERATORS} operators and {MOST_DEVICES} "
                f"devices; {cost.graph.name or 'the model'} has {len(cost.graph)} operators and "
                f"{cost.cluster.name} {total} devices: capture coarser operators (blocks), or use "
                "planner graphpipe"
            )
        limit = self.max_replicas or total
        require_sizes(cost, batch_size, microbatch_size, limit)
        found: list[Candidate] = []
        masks = [m for m, _ in partitions(cost)]
        sizes = [microbatch_size] if microbatch_size else microbatch_sizes(batch_size)
        for size in sizes:
            found += self._at_size(cost, batch_size, size, limit, masks)
        if not found:
            tree = decompose(cost.graph)
            order = tuple(operators(tree))
            problem = Problem(cost, build(cost, tree), order, batch_size, limit, False, 0.01)
            raise explain(problem, microbatch_size)
        return [candidate.graph for candidate in best(found, self.candidates)]

    def _at_size(
        self,
        cost: CostModel,
        batch_size: int,
        size: int,
        limit: int,
        masks: Sequence[tuple[int, ...]],
    ) -> Iterator[Candidate]:
        memory = cost.cluster.memory_bytes
        most = min(cost.cluster.num_devices, limit)
        prices = PartPrices(Prices(cost, batch_size, size, degrees(cost, size, most), memory))
        count = prices.prices.num_microbatches
        ranked: list[tuple[float, list[Part]]] = []
        for partition in masks:
            parts = best_replicas(prices, partition, cost.cluster.num_devices)
            if parts is not None:
                period = max(prices.period_s(part) for part in parts)
                ranked.append(((count - 1) * period + _longest_path(prices, parts), parts))
        ranked.sort(key=lambda each: each[0])
        assembler = Assembler(prices, tuple(range(len(cost.graph))), limit)
        for _, parts in ranked[: self.candidates]:
            candidate = assembler.assemble(parts)
            if candidate is not None:
                yield candidate


def partitions(cost: CostModel) -> Iterator[tuple[tuple[int, ...], set[tuple[int, int]]]]:
    """Every partition of the operators with an acyclic stage graph.

    Yields:
        Bit masks in topological order, and the stage edges. A part of such a partition is convex,
        or a path that leaves it and comes back would be a cycle.
    """
    n = len(cost.graph)

    def extend(i: int, parts: list[int]) -> Iterator[list[int]]:
        if i == n:
            yield parts
            return
        for s in range(len(parts)):
            yield from extend(i + 1, [*parts[:s], parts[s] | 1 << i, *parts[s + 1 :]])
        yield from extend(i + 1, [*parts, 1 << i])

    for masks in extend(0, []):
        home = {op: s for s, mask in enumerate(masks) for op in range(n) if mask >> op & 1}
        pairs = {(home[a], home[b]) for a, b in cost.graph.edges if home[a] != home[b]}
        order = _topological(len(masks), pairs)
        if order is not None:
            at = {s: k for k, s in enumerate(order)}
            yield tuple(masks[s] for s in order), {(at[x], at[y]) for x, y in pairs}


def _topological(count: int, pairs: set[tuple[int, int]]) -> list[int] | None:
    order: list[int] = []
    waiting = set(range(count))
    while waiting:
        ready = [s for s in sorted(waiting) if not any(y == s and x in waiting for x, y in pairs)]
        if not ready:
            return None
        order.append(ready[0])
        waiting.remove(ready[0])
    return order


def best_replicas(prices: PartPrices, masks: Sequence[int], devices: int) -> list[Part] | None:
    """Replicas that make the longest period of a partition as short as can be.

    Args:
        prices: prices the parts, at the degrees that may be used.
        masks: the partition in topological order.
        devices: devices at most.

    Returns:
        The parts with the fewest replicas for that period; None if memory or devices do not
        suffice.
    """
    plain = [Part(mask, 1) for mask in masks]
    height = heights(len(masks), edges(prices, plain))
    options = [
        [
            (prices.period_s(part), part.replicas, part)
            for part in (Part(mask, degree) for degree in prices.prices.degrees)
            if prices.headroom(part) >= h
        ]
        for mask, h in zip(masks, height, strict=True)
    ]
    if not all(options):
        return None
    least = max(min(period for period, _, _ in each) for each in options)
    for bound in sorted({period for each in options for period, _, _ in each if period >= least}):
        chosen = [
            min((degree, period, part) for period, degree, part in each if period <= bound)
            for each in options
        ]
        if sum(degree for degree, _, _ in chosen) <= devices:
            return [part for _, _, part in chosen]
    return None


def _longest_path(prices: PartPrices, parts: Sequence[Part]) -> float:
    longest = [prices.period_s(part) for part in parts]
    for x, y in sorted(edges(prices, parts), reverse=True):
        longest[x] = max(longest[x], longest[y] + prices.period_s(parts[x]))
    return max(longest)
