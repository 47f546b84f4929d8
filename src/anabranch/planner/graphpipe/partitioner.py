"""Pipeline stage partitioner: GraphPipe, section 5, Algorithm 1. Numbers in comments are its lines.

    DP(G, c_f, c_b, d, t_max)   fewest samples in flight before G, in a stage of configuration c_f,
                                where G gets d devices, a stage of configuration c_b follows it,
                                and no stage takes longer than t_max per sample

Our ``Strategies`` are the values of DP for one G, c_b and t_max: a table over c_f and d, so that
the loops over them (lines 35 to 37, 43) are array operations. The paper's recursion takes any cut;
here the first of the two parts of a series is a single stage, a block, or a block without the tail
of a branch, and of a block a run of branches, which gives the same stage graphs.

Axes of arrays: x and y, configurations of a stage and of the next one; k, mode; d, device groups.

Two things the paper implies only:

- G_1 and G_2 of a decomposition share their source and sink, so that the stage of a join may reach
  into the branches. As in the authors' published plans it then holds the tail of one branch::

      a1 --> a2 [--> a3 --+
                          +--> join --> head ]        one stage from a3 on
      b1 --> b2 ----------+

  Of branches that are the same the last is taken, cut at up to ``TAILS`` places.
- A stage may be several whole branches: the base case of a parallel decomposition.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from anabranch.compiled import compiled
from anabranch.cost.nested_sets import Floats, Ints, NestedSets
from anabranch.planner.graphpipe.chains import ParallelBlock, SeriesChain
from anabranch.planner.graphpipe.schedules import Schedules
from anabranch.planner.toolkit.budget import Budget
from anabranch.remembered import remembered

TAILS = 4
"""Places at which a branch is cut for the stage of its join; each costs a search of the branch."""

NEVER = 1 << 50
"""Samples in flight if there is no strategy."""

After = tuple[int, ...]
"""Samples that the stage right before c_b must hold, by the configuration of that stage."""


class PlannedStage(NamedTuple):
    """A stage: bit mask of its operators, places of configuration and mode, time per sample."""

    mask: int
    configuration: int
    mode: int
    tps: float


class Strategies(NamedTuple):
    """The best strategies for a sub-graph.

    Attributes:
        least: samples that a stage right before it must hold: [its configuration c_f, devices d].
        stages: (c_f, d) -> stages of the strategy.
    """

    least: Ints
    stages: Callable[[int, int], list[PlannedStage]]


def partition(
    chain: SeriesChain, schedules: Schedules, groups: int, tolerance: float, budget: Budget
) -> list[PlannedStage]:
    """Algorithm 1: minimise the time per sample of the slowest stage, to a relative tolerance.

    Args:
        groups: groups of devices; all are used.

    Returns:
        The stages; empty if nothing fits.
    """
    best: list[PlannedStage] = []  # 2
    low, high = 0.0, np.inf  # 2: infinity is a safe upper bound
    while high > low * (1 + tolerance):  # 3
        bound = (low + high) / 2 if best else np.inf  # 4
        stages = _BoundedSearch(schedules, chain, groups, bound, budget).stage_graph()  # 5
        if not stages:  # 6
            if not best:
                return []
            low = bound  # 7
        else:
            # 9: time of the slowest stage, which may be below the bound.
            high = max(stage.tps for stage in stages)
            best = stages  # 10
    return best  # 11


@dataclass(frozen=True, eq=False)
class _BoundedSearch:
    """SearchStageGraph (lines 13 to 20) for one bound; DP states are remembered (lines 24, 25)."""

    schedules: Schedules
    chain: SeriesChain
    groups: int
    bound: float
    budget: Budget

    def stage_graph(self) -> list[PlannedStage]:
        """Return stages on all devices with the least memory; empty if the bound is too low."""
        # 17: before the whole model there is no stage, behind it none that it waits for.
        whole = self._in_series(self.chain, len(self.chain), self.schedules.alone)
        # 15, 19: of all configurations the one with the fewest samples in flight.
        first = int(whole.least[:, self.groups].argmin())
        if whole.least[first, self.groups] >= NEVER:
            return []
        return whole.stages(first, self.groups)

    @remembered  # 24, 25
    def _in_series(self, chain: SeriesChain, stop: int, after: After) -> Strategies:
        """DP for the items of a chain up to ``stop``, followed by stages with demand ``after``."""
        tables, row = self.schedules.tables(chain.row), chain.row
        # For every cut the best of what follows it, and the stages that begin there.
        needs = np.full((stop + 1, len(after), self.groups + 1), NEVER, dtype=np.int64)
        needs[stop, :, 0] = after
        # No operators: a stage before them comes right before ``after``.
        nothing = Strategies(needs[stop], lambda _x, _d: [])
        rests = [nothing] * (stop + 1)
        behind = [nothing]
        for i in reversed(range(stop)):
            # 26 to 31, 34 to 40: G_1 is a single stage, solved after G_2, which follows it ..
            options = self._begins(row, tables, i, needs, rests)
            block = chain.items[i]
            if block is not None:
                # 34 to 40: .. or a block between two stages ..
                for rest in behind:
                    options += self._before(rest, block, lambda b, c: self._beside(b, 0, c)[-1])
                # .. or a block whose join has the tail of a branch.
                if i + 1 < stop:
                    options += self._joined(chain, i, block, needs, rests)
            rests[i] = self._pick_better(options)
            needs[i] = rests[i].least
            behind = options
        return rests[0]

    def _begins(
        self,
        row: NestedSets,
        tables: tuple[Floats, Ints],
        start: int,
        needs: Ints,
        rests: Sequence[Strategies],
    ) -> list[Strategies]:
        """Return the strategies that begin with a single stage (the base case, lines 26 to 31), one
        per configuration.

        Args:
            needs: demand of the stages after each item.
            rests: strategies for these stages.
        """
        schedules, (tps, room) = self.schedules, tables
        held = np.full(needs.shape[1:], NEVER, dtype=np.int64)
        chosen = np.zeros_like(held)
        places = len(needs) - 1 - start
        self.budget.spend(len(held) * len(schedules.devices) * places * needs.shape[2])
        _hold_fewest(tps, room, start, needs, schedules.devices, self.bound, held, chosen)

        def begin(y: int) -> Strategies:
            def stages(_: int, d: int) -> list[PlannedStage]:
                stop, k = divmod(int(chosen[y, d]), len(schedules.devices))
                rest = rests[stop].stages(y, d - int(schedules.devices[k]))
                return [PlannedStage(row.mask(start, stop), y, k, tps[y, k, start, stop]), *rest]

            return Strategies(np.minimum(held[y] + schedules.more[:, y, None], NEVER), stages)

        return [begin(y) for y in range(len(held)) if held[y].min() < NEVER]

    def _before(
        self,
        rest: Strategies,
        block: ParallelBlock,
        solve: Callable[[ParallelBlock, After], Strategies],
    ) -> list[Strategies]:
        """Return strategies for a G_1 in front of others (lines 35 to 40)."""
        columns: dict[After, list[int]] = {}
        for d, column in enumerate(rest.least.T.tolist()):
            if min(column) < NEVER:
                columns.setdefault(tuple(column), []).append(d)
        strategies = []
        # 39: the samples of G_2 decide those of G_1. Equal demands share one search.
        for c_b, devices in columns.items():
            first = solve(block, c_b)
            taken = np.full_like(rest.least, NEVER)
            taken[:, devices] = 0
            strategies.append(_side_by_side(Strategies(taken, rest.stages), first))
        return strategies

    @remembered
    def _beside(self, block: ParallelBlock, start: int, after: After) -> list[Strategies]:
        """DP for parallel branches (lines 41 to 46): from branch ``start`` up to each later one.

        G_2 is one branch, or a run of branches as a single stage; G_1 is the branches before.
        """
        alone = [self._in_series(own, len(own), after) for own in block.branches[start:]]
        more, devices = self.schedules.more, self.schedules.devices
        shape = len(alone) + 1, len(after), self.groups + 1
        self.budget.spend(shape[0] ** 2 // 2 * len(devices) * shape[1] ** 2 * shape[2])
        least = np.full(shape, NEVER, dtype=np.int64)
        least[0, :, 0] = 0  # no branches demand no samples
        choices = np.zeros((*shape, 4), dtype=np.int64)
        branches = np.stack([own.least for own in alone]) if alone else least[1:]
        asked, (tps, room) = np.array(after, dtype=np.int64), self.schedules.tables(block.row)
        _put_beside(branches, tps, room, start, asked, more, devices, self.bound, least, choices)

        def stages(stop: int, x: int, d: int) -> list[PlannedStage]:
            if not stop:
                return []
            middle, d1, y, k = choices[stop, x, d].tolist()
            first = start + middle
            if stop - middle == 1:
                stages_of_branch = alone[middle].stages(x, d - d1)
                last = [s._replace(mask=block.own(s.mask, first)) for s in stages_of_branch]
            else:
                mask, seconds = block.row.mask(first, start + stop), tps[y, k, first, start + stop]
                last = [PlannedStage(mask, y, k, seconds)]
            return [*stages(middle, x, d1), *last]

        return [Strategies(table, partial(stages, i)) for i, table in enumerate(least)]

    def _joined(
        self,
        chain: SeriesChain,
        place: int,
        block: ParallelBlock,
        needs: Ints,
        rests: Sequence[Strategies],
    ) -> list[Strategies]:
        """Return strategies of a stage after a block that has the tail of a branch as well."""
        strategies: list[Strategies] = []
        for q, (row, own) in chain.with_join(place).items():
            branch, end = block.branches[q], own + 1  # the stage has an item behind the block
            nowhere = np.full((end, *needs.shape[1:]), NEVER, dtype=np.int64)
            behind = np.concatenate([nowhere, needs[place + 2 :]])
            after = [rests[0]] * end + list(rests[place + 2 :])
            tables = self.schedules.tables(row, own)
            places = np.flatnonzero(self.schedules.tail_s(branch.row) <= self.bound)
            # The longest tail first.
            for cut in places[:: max(1, -(-len(places) // TAILS))].tolist():
                if tables[0][:, :, cut, end].min() > self.bound:
                    continue
                for begin in self._begins(row, tables, cut, behind, after):
                    without = partial(self._without_tail, q, cut)
                    strategies += self._before(begin, block, without)
        return strategies

    @remembered
    def _without_tail(self, q: int, cut: int, block: ParallelBlock, after: After) -> Strategies:
        """DP for a block whose branch q ends at a cut."""
        before, behind = self._beside(block, 0, after)[q], self._beside(block, q + 1, after)[-1]
        own = self._in_series(block.branches[q], cut, after)
        return _side_by_side(_side_by_side(before, behind), own)

    def _pick_better(self, options: Sequence[Strategies]) -> Strategies:
        """PickBetter (lines 18, 47): less memory, which is fewer samples in flight."""
        if len(options) == 1:
            return options[0]
        shape = len(self.schedules.configurations), self.groups + 1
        tables = np.stack([np.full(shape, NEVER), *(option.least for option in options)])
        chosen = tables.argmin(axis=0)
        return Strategies(tables.min(axis=0), lambda x, d: options[chosen[x, d] - 1].stages(x, d))


def _side_by_side(a: Strategies, b: Strategies) -> Strategies:
    """Lines 43 to 46: devices are split; the stage before both holds what either asks for."""
    # max(a[x, d1], b[x, d - d1]): [x, d, d1]; b has no strategy for less than no devices.
    number = np.arange(a.least.shape[1])
    rest = np.concatenate([b.least, np.full_like(b.least, NEVER)], axis=1)
    either = np.maximum(a.least[:, None], rest[:, np.subtract.outer(number, number)])
    chosen = either.argmin(axis=2)

    def stages(x: int, d: int) -> list[PlannedStage]:
        d1 = int(chosen[x, d])
        return [*a.stages(x, d1), *b.stages(x, d - d1)]

    return Strategies(either.min(axis=2), stages)


@compiled
def _hold_fewest(
    tps: Floats,
    room: Ints,
    start: int,
    needs: Ints,
    devices: Ints,
    bound: float,
    held: Ints,
    chosen: Ints,
) -> None:
    """Find the fewest samples held by a stage that begins at ``start``: [x, d].

    Args:
        tps: time per sample of single stages, [x, k, start, stop]; ``room`` has the same axes.
        needs: samples that stages behind each place demand, on d devices: [place, x, d].
        chosen: where the stage stops and its mode k as stop * modes + k.
    """
    modes, groups = tps.shape[1], needs.shape[2]
    for x in range(tps.shape[0]):
        for stop in range(start + 1, len(needs)):
            for k in range(modes):
                if tps[x, k, start, stop] <= bound:  # 28
                    for d in range(devices[k], groups):
                        samples = needs[stop, x, d - devices[k]]
                        # Algorithm 2, 7
                        if samples < held[x, d] and samples <= room[x, k, start, stop]:
                            held[x, d] = samples
                            chosen[x, d] = stop * modes + k


@compiled
def _put_beside(
    branches: Ints,
    tps: Floats,
    room: Ints,
    start: int,
    after: Ints,
    more: Ints,
    devices: Ints,
    bound: float,
    least: Ints,
    choices: Ints,
) -> None:
    """Find the samples before the first branches side by side, adding one branch at a time.

    Args:
        branches: samples before each branch alone: [branch, x, d].
        tps: time per sample of runs of branches as single stages: [x, k, start, stop].
        least: [stop, x, d].
        choices: the last branch or run begins at ``middle``, those before it have d1 devices, it
            is in configuration y and mode k: [stop, x, d, :].
    """
    sizes, modes, groups = tps.shape[0], tps.shape[1], least.shape[2]
    for stop in range(1, len(least)):
        for middle in range(stop - 1):
            for y in range(sizes):
                for x in range(sizes):
                    for d1 in range(groups):
                        samples = max(least[middle, x, d1], after[y] + more[x, y])
                        for k in range(modes):
                            d = d1 + devices[k]
                            if (
                                d < groups
                                and samples < least[stop, x, d]
                                and tps[y, k, start + middle, start + stop] <= bound  # 28
                                and after[y] <= room[y, k, start + middle, start + stop]
                            ):
                                least[stop, x, d] = samples
                                choices[stop, x, d, 0] = middle
                                choices[stop, x, d, 1] = d1
                                choices[stop, x, d, 2] = y
                                choices[stop, x, d, 3] = k
        for x in range(sizes):
            for d1 in range(groups):
                if least[stop - 1, x, d1] < NEVER:
                    for d2 in range(groups - d1):
                        samples = max(least[stop - 1, x, d1], branches[stop - 1, x, d2])
                        if samples < least[stop, x, d1 + d2]:
                            least[stop, x, d1 + d2] = samples
                            choices[stop, x, d1 + d2, 0] = stop - 1
                            choices[stop, x, d1 + d2, 1] = d1
