"""DAPPLE's recursion (section 4.3) for one micro-batch size, over all cuts at once.

The paper splits the last stage again and again; here it is the first stage that is still to be
split, because Algorithm 1 finds the pivot from the back and memory depends on what follows::

    [ 0 .. i )  one stage on all devices left  |  [ i .. ) planned, devices in use per machine

A state is the devices in use per machine, sorted, and the cut i; its ``T_PL`` is L with the first i
operators on all other devices. The best T_PL of all states is the plan.

L is no sum, so the best T_PL of a state need not lead to the best plan. A state keeps several
suffixes: ``width`` with the least T_PL, as in the paper, ``width`` with the least estimate of what
they can become part of (the rest shared out evenly, nothing of it reduced), and one of the fewest
stages, which leaves most memory. Of the states with equally many devices in use together,
``BREADTH`` times as many are kept per cut.

Suffixes that cannot beat the best plan are dropped, by the two lower bounds of ``dapple.objective``
with the work that is left shared out evenly over the devices that are left. So with all suffixes
kept the plan has the least L of all that the policies lead to.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from anabranch.compiled import Table, compiled, records
from anabranch.cost.communication import transfer_s
from anabranch.cost.nested_sets import Ints
from anabranch.planner.dapple.links import Links, hop_price, links
from anabranch.planner.dapple.objective import NOTHING, Suffix, latency_s, prepended
from anabranch.planner.dapple.placement import Machines
from anabranch.planner.dapple.tables import Runs, RunTables
from anabranch.planner.toolkit.budget import Budget
from anabranch.planner.toolkit.prices import ROUNDING

BREADTH = 4
"""Suffixes that are kept per cut, of all states with the same number of devices in use, as a
multiple of those of one state: how machines are filled matters less than how many are left."""

CHUNK = 50_000
"""Suffixes that are collected before the best are chosen, about; each takes 152 bytes."""

Labels = Any
"""A ``numpy.recarray`` of suffixes: fields of ``LABEL`` and of ``Suffix`` as attributes."""

# state, start        the state, and the operators before its cut
# stages, place       number of stages, and number of the first one's place
# source, parent,     how the first stage was added: the state before, the suffix behind it (its
# step                index among those with as many devices in use), the step of that state
# entering, gradients bytes of a micro-batch that are read from before, and sent back
# peak_s, closed_s    F + B of the slowest stage or transfer; T_PL, L with all before as one stage
# hoped_s, least_s    estimate of the best L of plans with this suffix, and lower bound of it
_NUMBERS = ("state", "start", "stages", "place", "source", "parent", "step")
_FIGURES = ("entering", "gradients", "peak_s", "closed_s", "hoped_s", "least_s", *Suffix._fields)
LABEL = np.dtype([*((name, np.int64) for name in _NUMBERS), *((name, float) for name in _FIGURES)])


@dataclass(frozen=True)
class ChainPlan:
    """A plan before it has operators' names.

    Attributes:
        cuts: where each stage begins and the last ends, as places in the order.
        devices: per stage.
    """

    latency_s: float
    cuts: tuple[int, ...]
    devices: tuple[tuple[int, ...], ...]


class PlacementSearch:
    """The recursion for one micro-batch size.

    Args:
        width: suffixes to keep per state and ranking. None: all.
        limit_s: plans of a greater L are not wanted.
    """

    def __init__(
        self,
        tables: RunTables,
        machines: Machines,
        budget: Budget,
        *,
        width: int | None,
        limit_s: float = np.inf,
    ) -> None:
        self._tables = tables
        self._machines = machines
        self._width = width
        self._budget = budget
        self._limit_s = limit_s
        self._devices = machines.cluster.num_devices
        self._links = links(machines.cluster)
        # By devices in use.
        self._pending: list[list[Labels]] = [[] for _ in range(self._devices)]
        self._settled: dict[int, Labels] = {}
        self._added: Labels = np.empty(CHUNK + len(tables.row), LABEL).view(np.recarray)
        # By number of stages behind the one on all other devices.
        self._best: Labels = np.zeros(self._devices, LABEL).view(np.recarray)

    def run(self) -> list[ChainPlan]:
        """Return the best plan for each number of stages that was reached, least L first."""
        # The one suffix of no stages, before which everything is data parallel.
        start: Labels = np.zeros(1, LABEL).view(np.recarray)
        start.start, start.closed_s = len(self._tables.row) - 1, self._data_parallel_s()
        for name, value in zip(Suffix._fields, NOTHING, strict=True):
            start[name] = value
        self._limit_s = min(self._limit_s, float(start.closed_s[0]))
        self._pending[0] = [start]
        self._best.closed_s = np.inf
        self._best[0] = start[0]
        for in_use, pending in enumerate(self._pending):
            if pending:
                self._settled[in_use] = self._settle(np.concatenate(pending).view(np.recarray))
                pending.clear()
                if len(self._settled[in_use]):
                    self._extend(self._settled[in_use])
        order = np.argsort(self._best.closed_s, kind="stable")
        return [self._chain(k) for k in order if self._best.closed_s[k] < np.inf]

    def _settle(self, labels: Labels) -> Labels:
        """Select the suffixes to extend among those with equally many devices, sorted by state."""
        labels = labels[labels.least_s <= self._limit_s * ROUNDING]
        if self._width is not None:
            labels = best_of_groups(labels, self._groups(labels), self._width)
            labels = best_of_groups(labels, labels.start, BREADTH * self._width)
        return labels[np.argsort(labels.state, kind="stable")]

    def _groups(self, labels: Labels) -> Ints:
        """Number the states and cuts of suffixes."""
        state = labels.state
        number = np.cumsum(np.bincount(state) > 0) - 1
        groups: Ints = number[state] * len(self._tables.row) + labels.start
        return groups

    def _extend(self, behind: Labels) -> None:
        """Add a stage in front of these suffixes in all ways, some at a time."""
        states, first = np.unique(behind.state, return_index=True)
        steps = [self._machines.steps(state) for state in states.tolist()]
        ends = np.cumsum([0, *map(len, steps)])
        parts = np.stack([first, [*first[1:], len(behind)], ends[:-1], ends[1:]], axis=1)
        places, levels = self._machines.table()
        counts = places.sum(axis=1)
        ways = Ways(np.concatenate(steps), places, counts, levels, self._links)
        progress = records(RecursionState, 1)
        progress[0].limit_s = self._limit_s
        while progress[0].part < len(parts):
            progress[0].added = progress[0].priced = 0
            extend(behind, parts, ways, self._tables.runs, self._best, self._added, progress)
            self._budget.spend(int(progress[0].priced))
            labels: Labels = self._added[: progress[0].added]
            if self._width is not None:
                labels = best_of_groups(labels, self._groups(labels), self._width)
            in_use = counts[labels.state]
            for number in np.unique(in_use).tolist():
                self._pending[number].append(labels[in_use == number])
        self._limit_s = float(progress[0].limit_s)

    def _data_parallel_s(self) -> float:
        """Return L of one stage on all devices; infinite if it does not fit."""
        runs = self._tables.runs
        k = runs.index_of[self._devices]
        if k < 0 or runs.headroom[k, 0, -1] < 0:
            return float("inf")
        link = self._machines.cluster.link(0, self._devices - 1)
        both_s = runs.forward_s[k, -1] + runs.backward_s[k, -1]
        ring_s = runs.rings_s[link.level, k, 0, -1]
        return float(self._tables.prices.num_microbatches * both_s + ring_s)

    def _chain(self, stages: int) -> ChainPlan:
        """Return the best plan with ``stages`` stages after one on all other devices."""
        label = self._best[stages]
        latency_s = float(label.closed_s)
        starts: list[int] = []
        steps: list[Ints] = []
        while label.stages:
            starts.append(int(label.start))
            steps.append(self._machines.steps(int(label.source))[label.step])
            label = self._settled[sum(self._machines.places[label.source])][label.parent]
        devices = self._machines.devices(steps[::-1])[::-1]
        return ChainPlan(latency_s, (0, *starts, len(self._tables.row) - 1), tuple(devices))


def best_of_groups(labels: Labels, group: Ints, width: int) -> Labels:
    """Keep per group the ``width`` least T_PL and estimates, and one suffix of fewest stages.

    Ties go to the first; the order is kept.
    """
    ranked = np.full((int(group.max(initial=0)) + 1, 2 * width + 1), -1)
    kept = np.zeros(len(labels), np.int64)
    _rank(np.ascontiguousarray(labels), np.ascontiguousarray(group, np.int64), ranked, kept)
    return labels[kept > 0]


def _key(label: Any, ranking: int) -> tuple[float, float]:
    if ranking == 0:
        return label.closed_s, label.hoped_s
    return (label.hoped_s, label.closed_s) if ranking == 1 else (label.stages, label.hoped_s)


@compiled
def _rank(labels: Labels, group: Ints, ranked: Ints, kept: Ints) -> None:
    """Mark the best suffixes; ``ranked`` has those of each group by the three rankings, else -1."""
    columns = ranked.shape[1]
    width = columns // 2
    for i in range(len(labels)):
        g = group[i]
        for ranking in range(3):
            first, end = ranking * width, min((ranking + 1) * width, columns)
            (first_key, second), at = _key(labels[i], ranking), end
            while at > first:
                before = ranked[g, at - 1]
                if before >= 0:
                    theirs, then = _key(labels[before], ranking)
                    if theirs < first_key or (theirs == first_key and then <= second):
                        break
                if at < end:
                    ranked[g, at] = before
                at -= 1
            if at < end:
                ranked[g, at] = i
    for g in range(len(ranked)):
        for k in range(columns):
            if ranked[g, k] >= 0:
                kept[ranked[g, k]] = 1


class Ways(NamedTuple):
    """All ways to place a stage in front of the suffixes of some states.

    Attributes:
        steps: as ``Machines.steps`` has them, state after state.
        places, levels: of ``Machines.table``.
        counts: devices per place.
    """

    steps: Ints
    places: Ints
    counts: Ints
    levels: Ints
    links: Links


class RecursionState:
    """Position of ``extend`` in its loops, from which it goes on when ``added`` was full."""

    part: int  # index in ``parts``
    pair: int  # next pair of suffix and step of this part
    added: int  # number of suffixes added
    priced: int  # number of suffixes priced
    limit_s: float  # least L so far


@compiled
def extend(
    behind: Labels,
    parts: Ints,
    ways: Ways,
    runs: Runs,
    best: Labels,
    added: Labels,
    progress: Table[RecursionState],
) -> None:
    """Price suffixes with one more stage in front.

    Args:
        behind: the suffixes, by states.
        parts: per state its suffixes' first and end, and its steps' first and end.
        best: per number of stages behind the closing one the best suffix so far; updated.
        added: gets the suffixes that are not too slow already.
        progress: the only record; updated.
    """
    at = progress[0]
    for part in range(at.part, len(parts)):
        first, count = parts[part, 0], parts[part, 1] - parts[part, 0]
        for pair in range(at.pair, count * (parts[part, 3] - parts[part, 2])):
            if at.added + len(runs.work_s) > len(added):
                at.part, at.pair = part, pair
                return
            parent, way = first + pair % count, pair // count
            _prepend(parent, way, parts[part, 2] + way, behind, ways, runs, best, added, at)
        at.pair = 0
    at.part = len(parts)


def _prepend(
    parent: int,
    way: int,
    step: int,
    behind: Labels,
    ways: Ways,
    runs: Runs,
    best: Labels,
    added: Labels,
    progress: RecursionState,
) -> None:
    """Price a suffix with a stage in front at one place, for all cuts at which it can begin.

    Args:
        parent: index of the suffix.
        way: index of the step among those of the state.
        step: its index in ``ways``.
    """
    count, label = runs.num_microbatches, behind[parent]
    place, taken, rest = ways.steps[step, 1], ways.steps[step, 2], ways.steps[step, 3]
    degree, free = runs.index_of[ways.counts[taken]], ways.counts[rest]
    if degree < 0 or free < runs.degrees[0]:
        return
    hop = hop_price(ways.links, ways.places, taken, label.place) if label.stages else (0.0, 0.0)
    suffix = _linked(_suffix(label), label, hop, count)
    link_s = transfer_s(label.entering, *hop) + transfer_s(label.gradients, *hop)
    peak_s = max(label.peak_s, link_s)
    # Neither the stage nor the average of those to come exceeds a period of the best plan.
    period_s = progress.limit_s * ROUNDING / count
    if peak_s > period_s:
        return
    closing_hop = hop_price(ways.links, ways.places, rest, place)
    for start in range(label.start - 1, max(1, -(-free // runs.degrees[-1])) - 1, -1):
        forward = runs.forward_s[degree, label.start] - runs.forward_s[degree, start]
        backward = runs.backward_s[degree, label.start] - runs.backward_s[degree, start]
        if forward + backward > period_s:
            break
        average_s = runs.work_s[start] / free
        if average_s > period_s:
            continue
        progress.priced += 1
        if runs.headroom[degree, start, label.start] < label.stages:
            continue
        ring_s = runs.rings_s[ways.levels[taken], degree, start, label.start]
        grown = prepended(suffix, forward, backward, ring_s, count)
        row = added[progress.added]
        row.state, row.start, row.stages = ways.steps[step, 0], start, label.stages + 1
        row.place, row.source = place, label.state
        row.parent, row.step = parent, way
        row.entering = runs.entering[start, label.start]
        row.gradients = runs.gradients[start, label.start]
        row.peak_s = max(peak_s, forward + backward)
        row.pivot_s, row.between_s = grown.pivot_s, grown.between_s
        row.warm_s, row.back_s = grown.warm_s, grown.back_s
        row.ending_s, row.behind_s = grown.ending_s, grown.behind_s
        row.closed_s = _closed_s(grown, row, free, ways.levels[rest], closing_hop, runs)
        if row.closed_s < best[row.stages].closed_s:
            best[row.stages] = row
            progress.limit_s = min(progress.limit_s, row.closed_s)
        row.least_s, row.hoped_s = _bounds(grown, row, free, runs)
        if row.least_s <= progress.limit_s * ROUNDING:
            progress.added += 1


def _closed_s(
    suffix: Suffix, label: Any, free: int, level: int, hop: tuple[float, float], runs: Runs
) -> float:
    """Return L with all operators before a suffix as one stage on the ``free`` devices that are
    left, which this level of the cluster connects; infinity if it does not fit.
    """
    degree, start, count = runs.index_of[free], label.start, runs.num_microbatches
    if degree < 0 or runs.headroom[degree, 0, start] < label.stages:
        return np.inf
    linked = _linked(suffix, label, hop, count)
    forward, backward = runs.forward_s[degree, start], runs.backward_s[degree, start]
    ring_s = runs.rings_s[level, degree, 0, start]
    return latency_s(prepended(linked, forward, backward, ring_s, count), count)


def _bounds(suffix: Suffix, label: Any, free: int, runs: Runs) -> tuple[float, float]:
    """Return a lower bound of L of all plans with this suffix, and an estimate of the best, with
    the work before it shared out evenly over the ``free`` devices that are left.
    """
    steady, start = runs.num_microbatches - 1, label.start
    average_s, steady_s = runs.work_s[start] / free, steady * suffix.pivot_s
    peak_s = max(label.peak_s, average_s)
    least_s = max(runs.num_microbatches * peak_s, steady_s + suffix.between_s)
    left_s, left_back_s = runs.least_both_s[free, start], runs.least_backward_s[free, start]
    if steady * average_s > steady_s + suffix.between_s:
        hoped_s = steady * average_s + max(suffix.behind_s, left_back_s)
    else:
        ending_s = max(suffix.ending_s, suffix.back_s + left_back_s)
        hoped_s = suffix.warm_s + steady_s + ending_s
    return least_s, max(least_s, hoped_s + left_s - left_back_s)


def _suffix(label: Any) -> Suffix:
    pivot_s, between_s, warm_s = label.pivot_s, label.between_s, label.warm_s
    return Suffix(pivot_s, between_s, warm_s, label.back_s, label.ending_s, label.behind_s)


def _linked(
    suffix: Suffix, label: Any, price: tuple[float, float], num_microbatches: int
) -> Suffix:
    """Return the terms with the transfer before the suffix, at the price of the hop."""
    there, back = transfer_s(label.entering, *price), transfer_s(label.gradients, *price)
    return prepended(suffix, there, back, 0.0, num_microbatches)
