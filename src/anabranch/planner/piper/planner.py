"""Piper's planner: a search per micro-batch size, and a refusal where nothing fits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import ClassVar

from anabranch.cost import CostModel
from anabranch.graph.opgraph import bits
from anabranch.graph.series_parallel import decompose, operators
from anabranch.planner.base import require_options
from anabranch.planner.downsets import downsets, prefixes
from anabranch.planner.piper.prices import DownsetPairs, DownsetPrices
from anabranch.planner.piper.search import ROUNDING, BoundedPlans, LoadSearch
from anabranch.planner.toolkit.assemble import Assembler
from anabranch.planner.toolkit.infeasible import explain, require_sizes
from anabranch.planner.toolkit.parts import Part, PartPrices
from anabranch.planner.toolkit.prices import MicrobatchPrices, Mode, degrees, microbatch_sizes
from anabranch.planner.toolkit.problem import Problem
from anabranch.plans.stages import StageGraph

_ROW_PAIRS = 1 << 24
"""Nested pairs of the prefixes of a row; 5,700 operators have as many."""


@dataclass(frozen=True)
class Piper:
    """Dynamic programme over nested downsets; ``planner.piper`` states it.

    Of all lines of convex stages, and for every micro-batch size, one with the least load, to
    ``tolerance``. Time and memory grow with the nested pairs of downsets: a chain of n operators
    has n (n + 1) / 2, k chains side by side about the k-th power of that.

    Attributes:
        max_replicas: replicas per stage at most. None: no limit.
        recompute: stages may recompute.
        linear: only stages that are runs of the operators in one order, branch after branch; needs
            no budget up to 5,700 of them.
        any_degree: numbers of replicas that are no power of two as well.
        tolerance: relative distance to the least load at which its search ends; 0 for none.
        budget: downsets at most.
        pairs: nested pairs of downsets at most; 16 million take about half a gigabyte.
    """

    max_replicas: int | None = None
    recompute: bool = True
    linear: bool = False
    any_degree: bool = False
    tolerance: float = 1e-3
    budget: int = 20_000
    pairs: int = 16_000_000

    schedules: ClassVar[tuple[str, ...]] = ("1f1b",)

    def __post_init__(self) -> None:
        require_options("piper", self, max_replicas=1, tolerance=0, budget=1, pairs=1)

    def __call__(
        self, cost: CostModel, *, batch_size: int, microbatch_size: int | None = None
    ) -> Iterator[StageGraph]:
        """Propose up to two stage graphs per micro-batch size, as they are found.

        Raises:
            InfeasiblePlanError: if nothing fits; the message says what would.
            BudgetError: if the model has more downsets than ``budget``, or more nested pairs of
                them than ``pairs``.
        """
        limit = self.max_replicas or cost.cluster.num_devices
        tensor = max(_tensor_degrees(cost))
        require_sizes(cost, batch_size, microbatch_size, limit, tensor=tensor)
        proposals = self._proposals(cost, batch_size, microbatch_size)
        first = next(proposals, None)
        if first is None:
            problem = Problem(
                cost, batch_size, self.max_replicas, chained=True, recompute=self.recompute
            )
            raise explain(problem, microbatch_size)
        return chain([first], proposals)

    def _proposals(
        self, cost: CostModel, batch_size: int, microbatch_size: int | None
    ) -> Iterator[StageGraph]:
        row = _row(cost)
        spaces = [row]
        if not self.linear:
            masks = downsets(cost.graph, self.budget)
            spaces.append(DownsetPairs.of(cost, masks, self.pairs))
        for size in microbatch_sizes(batch_size, microbatch_size):
            prices, modes = self._at(cost, batch_size, size)
            if modes:
                yield from self._graphs(
                    [(DownsetPrices(prices, space.downsets, modes), space) for space in spaces]
                )

    def _at(
        self, cost: CostModel, batch_size: int, size: int
    ) -> tuple[MicrobatchPrices, list[Mode]]:
        """Prices at a micro-batch size, and how a stage may run there."""
        total = cost.cluster.num_devices
        most = self.max_replicas or total
        modes = [
            Mode(replicas, recompute, tensor)
            for tensor in _tensor_degrees(cost)
            for replicas in degrees(
                cost,
                size,
                min(most, total // tensor),
                batch_size=batch_size,
                every=self.any_degree,
            )
            for recompute in (False, True)
            if self.recompute or not recompute
        ]
        prices = MicrobatchPrices(
            cost,
            batch_size,
            size,
            tuple(sorted({mode.replicas for mode in modes})),
            cost.cluster.memory_bytes,
            tuple(_tensor_degrees(cost)),
            self.recompute,
        )
        return prices, modes

    def _graphs(self, searched: list[tuple[DownsetPrices, DownsetPairs]]) -> Iterator[StageGraph]:
        """Plans of the least load: with the fewest stages, and on exactly all devices."""
        found, stages = None, searched[0][0]
        for prices, space in searched:
            # What a row achieves leaves few of the nested pairs that need a closer look.
            bound_s = found and found.load_s / max(1 + self.tolerance, ROUNDING)
            better = least(prices, space, self.tolerance, bound_s=bound_s)
            if better is not None:
                found, stages = better, prices
        if found is None:
            return
        few = self._assembled(stages, found, exact=False)
        if few is not None:
            yield few
        whole: BoundedPlans | None = found
        if not found.reached(exact=True):
            # The devices that are idle may be of no use to any of the stages.
            stages, space = searched[-1]
            whole = None if few else least(stages, space, self.tolerance, exact=True)
        if whole is not None:
            full = self._assembled(stages, whole, exact=True)
            if full is not None and full != few:
                yield full

    def _assembled(
        self, stages: DownsetPrices, found: BoundedPlans, *, exact: bool
    ) -> StageGraph | None:
        """A plan on all devices; None if its stages have no use for all of them."""
        options, parts = found.options, []
        for i in found.chain(exact=exact):
            mode = stages.modes[int(options.mode[i])]
            mask = stages.downsets.mask(int(options.lo[i]), int(options.hi[i]))
            parts.append(Part(mask, mode.replicas, mode.recompute, mode.tensor))
        prices = PartPrices(stages.prices)
        order = tuple(op for part in parts for op in bits(part.mask))
        limit = self.max_replicas or prices.cost.cluster.num_devices
        candidate = Assembler(prices, order, limit, chained=True).assemble(parts)
        return None if candidate is None else candidate.graph


def _tensor_degrees(cost: CostModel) -> list[int]:
    """Devices that may hold a replica together: they share a node."""
    node = cost.cluster.group_sizes[0]
    return [degree for degree in cost.tensor_degrees if node % degree == 0]


def _row(cost: CostModel) -> DownsetPairs:
    """The operators in one order, branch after branch."""
    return DownsetPairs.of(cost, prefixes(tuple(operators(decompose(cost.graph)))), _ROW_PAIRS)


def least(
    stages: DownsetPrices,
    space: DownsetPairs,
    tolerance: float,
    *,
    bound_s: float | None = None,
    exact: bool = False,
) -> BoundedPlans | None:
    """The plans of the least load, none above a bound; None if nothing fits.

    Args:
        tolerance: relative distance to the least load that will do.
        exact: plans must take all devices rather than some of them.
    """
    limit = stages.prices.cost.cluster.num_devices
    # The search comes so near twice, to a lower bound and from there to the least.
    near = (1 + tolerance) ** 0.5 - 1
    search = LoadSearch(len(stages.downsets), limit, near, stages.floor_s)
    # Without a bound: upwards from a load that could hardly be less.
    bound = 2 * stages.least_s if bound_s is None else bound_s
    last = stages.most_s if bound_s is None else bound_s
    while True:
        bound = min(bound, last) if bound > 0 else last
        near = stages.possible(space.pairs, space.traffic, bound)
        pairs = space.pairs[near]
        devices = stages.fewest_devices(pairs, space.traffic[near], bound)
        kept = search.useful(pairs, devices)
        if kept is not None:
            found = search.least(stages.options(*kept, bound), bound, exact=exact)
            if found is not None:
                return found
        if bound >= last:
            return None
        bound *= 2
