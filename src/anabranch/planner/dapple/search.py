"""DAPPLE's recursion (section 4.3) for one micro-batch size, over all cuts at once.

The paper splits the last stage again and again; here it is the first stage that is still to be
split, because Algorithm 1 finds the pivot from the back and memory depends on what follows::

    [ 0 .. i )  one stage on all devices left  |  [ i .. ) planned, devices in use per machine

A state is the devices in use per machine, sorted, and the cut i; its ``T_PL`` is L with the first i
operators on all other devices. The best T_PL of all states is the plan.

L is no sum, so the best T_PL of a state need not lead to the best plan, and the paper keeps one per
state. Here several suffixes are kept per cut and number of devices in use: ``width`` with the least
T_PL, ``width`` with the least estimate of what they can become part of (the rest shared out evenly,
nothing of it reduced), and one of the fewest stages, which leaves most memory.

Suffixes that cannot beat the best plan are dropped, by the two lower bounds of ``dapple.objective``
with the work that is left shared out evenly over the devices that are left. So with all suffixes
kept the plan has the least L of all that the policies lead to.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from anabranch.compiled import compiled
from anabranch.cost.communication import transfer_s
from anabranch.cost.nested_weights import Ints
from anabranch.planner.dapple.links import Links, hop_price, links
from anabranch.planner.dapple.objective import NOTHING, Suffix, latency_s, prepended
from anabranch.planner.dapple.placement import Machines
from anabranch.planner.dapple.tables import Runs, RunTables
from anabranch.planner.toolkit.budget import Budget
from anabranch.planner.toolkit.prices import HIDING, ROUNDING

AT_ONCE = 100_000
"""Suffixes that are added before the best of them are chosen; each takes 144 bytes."""

Labels = Any
"""A ``numpy.recarray`` of suffixes: fields of ``LABEL`` and of ``Suffix`` as attributes."""

# The state and its devices in use; the operators before the cut; how many stages there are, and
# number of the first one's place; the state before it was added, which suffix of those with as many
# devices in use it was added to, and by which step of that state.
#
# Bytes of one micro-batch that they read from before, and of gradients that they send back; T_PL, L
# with all that comes before as one stage on all other devices; an estimate of the best L that they
# can be part of, and a lower bound on it.
_NUMBERS = ("state", "used", "start", "stages", "place", "source", "parent", "step")
_FIGURES = ("entering", "gradients", "closed_s", "hoped_s", "least_s", *Suffix._fields)
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
        width: suffixes to keep per cut, devices in use and ranking. None: all.
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
        self._settled: list[Labels] = []
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
        self._best.closed_s = np.inf
        self._best[0] = start[0]
        waiting = start
        for in_use in range(self._devices):
            self._settled.append(waiting[waiting.used == in_use])
            waiting = waiting[waiting.used > in_use]
            for added in self._extended(self._settled[in_use]):
                waiting = self._selected(np.concatenate([waiting, added]).view(np.recarray))
        order = np.argsort(self._best.closed_s, kind="stable")
        return [self._chain(k) for k in order if self._best.closed_s[k] < np.inf]

    def _selected(self, labels: Labels) -> Labels:
        """Select the suffixes that may be extended."""
        labels = labels[labels.least_s <= self._limit_s * ROUNDING]
        if self._width is None:
            return labels
        groups = labels.used * len(self._tables.row) + labels.start
        return best_of_groups(labels, groups, self._width)

    def _extended(self, behind: Labels) -> Iterator[Labels]:
        """Add a stage in front of these suffixes in all ways, some at a time."""
        steps = [self._machines.steps(state) for state in behind.state.tolist()]
        ways = [(parent, way) for parent, some in enumerate(steps) for way in range(len(some))]
        places, levels = self._machines.table()
        at_once = -(-AT_ONCE // len(self._tables.row))
        added: Labels = np.empty(at_once * len(self._tables.row), LABEL).view(np.recarray)
        for first in range(0, len(ways), at_once):
            some = ways[first : first + at_once]
            self._limit_s, kept, priced = extend(
                behind,
                np.array(some),
                np.array([steps[parent][way] for parent, way in some]),
                places,
                levels,
                self._links,
                self._tables.runs,
                self._tables.prices.num_microbatches,
                self._best,
                added,
                self._limit_s,
            )
            self._budget.spend(priced)
            yield added[:kept]

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
    kept = np.zeros(len(labels), dtype=bool)
    closed, hoped = labels.closed_s, labels.hoped_s
    rankings = (closed, hoped, width), (hoped, closed, width), (labels.stages, hoped, 1)
    for key, second, most in rankings:
        order = np.lexsort((second, key, group))
        ordered, is_best = group[order], np.ones(len(order), dtype=bool)
        is_best[most:] = ordered[most:] != ordered[:-most]
        kept[order[is_best]] = True
    return labels[kept]


def _suffix(label: Any) -> Suffix:
    pivot_s, between_s, warm_s = label.pivot_s, label.between_s, label.warm_s
    return Suffix(pivot_s, between_s, warm_s, label.back_s, label.ending_s, label.behind_s)


def _linked(
    suffix: Suffix, label: Any, price: tuple[float, float], num_microbatches: int
) -> Suffix:
    """Return the terms with the transfer before the suffix, at the price of the hop."""
    there, back = transfer_s(label.entering, *price), transfer_s(label.gradients, *price)
    return prepended(suffix, there, back, 0.0, num_microbatches)


@compiled
def extend(
    behind: Labels,
    ways: Ints,
    steps: Ints,
    places: Ints,
    levels: Ints,
    links: Links,
    runs: Runs,
    num_microbatches: int,
    best: Labels,
    added: Labels,
    limit_s: float,
) -> tuple[float, int, int]:
    """Price suffixes with one more stage in front; return the least L so far, and how many suffixes
    were added and priced.

    Args:
        behind: suffixes with as many devices in use.
        ways: the suffix, and the place of the step among those of its state: [way, :].
        steps: of each way as ``Machines.steps`` has them.
        levels: of ``Machines.table``, as ``places``.
        best: per number of stages behind the closing one the best suffix so far; updated.
        added: gets the suffixes that are not too slow already.
    """
    steady, count, priced = num_microbatches - 1, 0, 0
    for n in range(len(ways)):
        place, taken, rest = steps[n, 1], steps[n, 2], steps[n, 3]
        degree, free = runs.index_of[places[taken].sum()], places[rest].sum()
        if degree < 0 or free < runs.degrees[0]:
            continue
        closing, closing_hop = runs.index_of[free], hop_price(links, places, rest, place)
        label = behind[ways[n, 0]]
        hop = hop_price(links, places, taken, label.place) if label.stages else (0.0, 0.0)
        suffix = _linked(_suffix(label), label, hop, num_microbatches)
        for start in range(label.start - 1, max(1, -(-free // runs.degrees[-1])) - 1, -1):
            forward = runs.forward_s[degree, label.start] - runs.forward_s[degree, start]
            backward = runs.backward_s[degree, label.start] - runs.backward_s[degree, start]
            # Neither the stage nor the average of those to come takes longer than a period of the
            # best plan.
            period_s = limit_s * ROUNDING / num_microbatches
            if forward + backward > period_s:
                break
            average_s = runs.work_s[start] / free
            if average_s > period_s:
                continue
            priced += 1
            if runs.headroom[degree, start, label.start] < label.stages:
                continue
            ring_s = runs.rings_s[levels[taken], degree, start, label.start]
            grown = prepended(suffix, forward, backward, ring_s, num_microbatches)
            row = added[count]
            row.state, row.used = steps[n, 0], len(runs.index_of) - 1 - free
            row.start, row.stages, row.place = start, label.stages + 1, place
            row.source, row.parent, row.step = label.state, ways[n, 0], ways[n, 1]
            row.entering = runs.entering[start, label.start]
            row.gradients = runs.gradients[start, label.start]
            row.pivot_s, row.between_s = grown.pivot_s, grown.between_s
            row.warm_s, row.back_s = grown.warm_s, grown.back_s
            row.ending_s, row.behind_s = grown.ending_s, grown.behind_s
            row.closed_s = np.inf
            if closing >= 0 and runs.headroom[closing, 0, start] > label.stages:
                whole = prepended(
                    _linked(grown, row, closing_hop, num_microbatches),
                    runs.forward_s[closing, start],
                    runs.backward_s[closing, start],
                    runs.rings_s[levels[rest], closing, 0, start],
                    num_microbatches,
                )
                row.closed_s = latency_s(whole, num_microbatches)
                if row.closed_s < best[row.stages].closed_s:
                    best[row.stages] = row
                    limit_s = min(limit_s, row.closed_s)
            # The rest on average, with a backward that takes its usual share.
            back_s, steady_s = HIDING * average_s, steady * grown.pivot_s
            row.least_s = max(num_microbatches * average_s, steady_s + grown.between_s)
            if steady * average_s > steady_s + grown.between_s:
                hoped_s = steady * average_s + max(grown.behind_s, back_s)
            else:
                hoped_s = grown.warm_s + steady_s + max(grown.ending_s, grown.back_s + back_s)
            row.hoped_s = max(row.least_s, hoped_s + average_s - back_s)
            if row.least_s <= limit_s * ROUNDING:
                count += 1
    return limit_s, count, priced
