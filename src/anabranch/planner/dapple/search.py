"""DAPPLE's recursion (section 4.3) for one micro-batch size, over all cuts at once.

The paper plans the first layers and leaves the rest as one last stage, which it splits again and
again. Here the recursion runs the other way, it is the first stage that is still to be split::

    [ 0 .. i )  one stage on all devices left  |  [ i .. ) planned, devices in use per machine

because Algorithm 1 finds the pivot from the back, and because a stage's distance to the end, on
which its memory depends, is then known. A state is the devices in use per machine, sorted, and the
cut i; its ``T_PL`` is L with the first i operators on all other devices. The best T_PL of all
states is the plan.

L is no sum, so the best T_PL of a state need not lead to the best plan: while the first stage holds
most of the model on most of the devices, its all-reduce covers up whatever lies behind it. So a
state keeps several suffixes: ``width`` with the least T_PL, as in the paper, ``width`` with the
least estimate of what they can become part of (the rest shared out evenly, nothing of it reduced),
and one of the fewest stages, which leaves most memory, so that a plan is found if any fits.

Suffixes that cannot beat the best plan are dropped, by the two lower bounds of ``dapple.objective``
with the work that is left shared out evenly over the devices that are left.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from anabranch.errors import BudgetError
from anabranch.planner.dapple.labels import Floats, Index, Labels, best_of_groups, pick
from anabranch.planner.dapple.links import Place
from anabranch.planner.dapple.placement import Machines, Step
from anabranch.planner.dapple.tables import Tables

EXACT = 1 + 1e-9
"""Room for rounding when a bound is compared with a latency."""

CHUNK = 400_000
"""Suffixes that are priced in one go, about; each takes about 300 bytes."""


@dataclass(frozen=True)
class Chain:
    """A plan before it has operators' names.

    Attributes:
        latency_s: L.
        cuts: where each stage begins and the last ends, as places in the order.
        devices: per stage.
    """

    latency_s: float
    cuts: tuple[int, ...]
    devices: tuple[tuple[int, ...], ...]


@dataclass
class Budget:
    """Suffixes that may be priced: how many in all, and how many were."""

    total: int
    used: int = 0

    def spend(self, count: int, microbatch_size: int) -> None:
        """Take some.

        Raises:
            BudgetError: if there are not as many left.
        """
        self.used += count
        if self.used > self.total:
            raise BudgetError(
                f"planner dapple got to micro-batches of {microbatch_size} samples, would have "
                f"priced {self.used:,} pipelines there, and may price {self.total:,} in all: raise "
                "its option budget, lower width, set max_stages, give one micro-batch size, or "
                "capture the model in coarser operators"
            )


@dataclass(frozen=True)
class Move:
    """One more stage in a state, as far as it is the same for all cuts.

    Attributes:
        step: its devices.
        degree: place of its number of replicas in the tables.
        target: number of the state that it leads to.
        place: number of its place there.
        free: devices that are left there.
    """

    step: Step
    degree: int
    target: int
    place: int
    free: int


class Search:
    """The recursion for one micro-batch size.

    Args:
        tables: prices of all runs of operators.
        machines: the cluster.
        width: suffixes to keep per state and ranking. None: all.
        max_stages: most stages of a plan. None: no limit.
        budget: what may be priced.
        limit_s: plans of a greater L are not wanted.
    """

    def __init__(
        self,
        tables: Tables,
        machines: Machines,
        *,
        width: int | None,
        max_stages: int | None,
        budget: Budget,
        limit_s: float = np.inf,
    ) -> None:
        self._tables = tables
        self._machines = machines
        self._width = width
        self._max_stages = max_stages or tables.terms.row.size
        self._budget = budget
        self._limit_s = limit_s
        self._states: list[Place] = [machines.empty]
        self._places: list[Place] = [machines.empty]
        self._number: dict[Place, int] = {machines.empty: 0}
        self._place_number: dict[Place, int] = {machines.empty: 0}
        self._settled: dict[int, Labels] = {}
        self._moves: dict[int, list[Move]] = {}
        self._pending: dict[int, list[Labels]] = defaultdict(list)
        self._best: dict[int, Labels] = {}

    def run(self) -> list[Chain]:
        """The best plan and the best of other numbers of stages that came up, least L first."""
        start = Labels.no_stages(self._tables.terms.row.size)
        whole = self._closed_s(start, 0, self._machines.cluster.num_devices)
        self._consider(replace(start, closed_s=whole))
        self._pending[0].append(start)
        for in_use in range(self._machines.cluster.num_devices):
            states = [s for s in self._pending if sum(self._states[s]) == in_use]
            for state in sorted(states, key=lambda s: self._states[s]):
                self._settle(state)
                self._extend(state)
        found = [label for label in self._best.values() if label.closed_s[0] < np.inf]
        return [self._chain(label) for label in sorted(found, key=lambda each: each.closed_s[0])]

    def _settle(self, state: int) -> None:
        labels = Labels.join(self._pending.pop(state))
        labels = labels.take(labels.least_s <= self._limit_s * EXACT)
        self._settled[state] = self._selected(labels, labels.start)

    def _selected(self, labels: Labels, group: Index) -> Labels:
        if self._width is None or not len(labels):
            return labels
        return labels.take(best_of_groups(labels, group, self._width))

    def _extend(self, state: int) -> None:
        """All ways to add a stage in front of the suffixes of a state."""
        labels = self._settled[state]
        self._moves[state] = moves = list(self._ways(state))
        if not moves or not len(labels):
            return
        first, count = self._starts(labels, moves)
        begin = 0
        while begin < len(moves):
            end = begin + 1
            while end < len(moves) and count[begin : end + 1].sum() <= CHUNK:
                end += 1
            self._add(state, range(begin, end), first[begin:end], count[begin:end])
            begin = end

    def _ways(self, state: int) -> Iterator[Move]:
        used = self._states[state]
        free = self._machines.cluster.num_devices - sum(used)
        for k, degree in enumerate(self._tables.degrees):
            if degree < free:
                for step in self._machines.steps(used, degree):
                    target = _numbered(step.used, self._states, self._number)
                    place = _numbered(step.place, self._places, self._place_number)
                    yield Move(step, k, target, place, free - degree)

    def _starts(self, labels: Labels, moves: list[Move]) -> tuple[Index, Index]:
        """Per move and suffix the first operator at which a stage may begin, and how many may.

        A stage is no longer than a period of the best plan, and neither is the average of those
        to come; and every device that is left needs an operator.
        """
        tables = self._tables
        period = self._limit_s * EXACT / tables.num_microbatches
        free = np.array([move.free for move in moves])
        low = np.maximum(1, -(-free // tables.degrees[-1]))[:, None]
        high = np.searchsorted(tables.work_s, period * free, side="right")[:, None] - 1
        times = [tables.both_s[move.degree] for move in moves]
        reach = [np.searchsorted(time, time[labels.start] - period, side="left") for time in times]
        first = np.maximum(low, np.stack(reach))
        last = np.minimum(high, labels.start - 1)
        more = labels.stages + 2 <= self._max_stages
        return first, np.where(more, np.maximum(last - first + 1, 0), 0)

    def _add(self, state: int, chosen: range, first: Index, count: Index) -> None:
        """Price the suffixes with one more stage and hand them to the states they lead to."""
        total = int(count.sum())
        self._budget.spend(total, self._tables.microbatch_size)
        if not total:
            return
        pair = np.repeat(np.arange(count.size), count.ravel())
        offset = np.arange(total) - np.repeat(
            np.cumsum(count.ravel()) - count.ravel(), count.ravel()
        )
        start = first.ravel()[pair] + offset
        move, parent = np.divmod(pair, len(self._settled[state]))
        labels = self._settled[state]
        moves = self._moves[state]
        degree = np.array([moves[k].degree for k in chosen])[move]
        stop = labels.start[parent]
        fits = self._tables.headroom[degree, start, stop] >= labels.stages[parent]
        added = self._prepended(
            state, move[fits] + chosen.start, parent[fits], start[fits], degree[fits]
        )
        self._hand_on(added, moves)

    def _hand_on(self, added: Labels, moves: list[Move]) -> None:
        self._consider(added)
        added = added.take(added.least_s <= self._limit_s * EXACT)
        targets = np.array([move.target for move in moves])
        target = targets[added.move]
        size = self._tables.terms.row.size + 1
        if self._width is not None and len(added):
            kept = best_of_groups(added, target * size + added.start, self._width)
            added, target = added.take(kept), target[kept]
        for state in np.unique(target):
            self._pending[int(state)].append(added.take(target == state))

    def _prepended(
        self, state: int, move: Index, parent: Index, start: Index, degree: Index
    ) -> Labels:
        tables, labels, moves = self._tables, self._settled[state], self._moves[state]
        per_byte, latency_s = self._hops(moves, labels, move, parent)
        there, back = _transfer(labels, parent, per_byte, latency_s)
        stop = labels.start[parent]
        forward = tables.forward_s[degree, stop] - tables.forward_s[degree, start]
        backward = tables.backward_s[degree, stop] - tables.backward_s[degree, start]
        reduce_s = np.empty(len(move))
        for k, part in _segments(move):
            price = self._machines.ring(moves[k].step.taken)
            ring = tables.reduce_s(tables.degrees[moves[k].degree], *price)
            reduce_s[part] = ring[start[part], stop[part]]
        suffix = pick(labels.suffix, parent).prepend(there, back, 0.0, tables.num_microbatches)
        suffix = suffix.prepend(forward, backward, reduce_s, tables.num_microbatches)
        peak = np.maximum(np.maximum(labels.peak_s[parent], there + back), forward + backward)
        zeros = np.zeros(len(move))
        added = Labels(
            start,
            labels.stages[parent] + 1,
            tables.entering[start, stop],
            tables.gradients[start, stop],
            peak,
            np.array([each.place for each in moves])[move],
            zeros,
            zeros,
            zeros,
            np.full(len(move), state),
            parent,
            move,
            suffix,
        )
        return self._valued(added, moves)

    def _hops(
        self, moves: list[Move], labels: Labels, move: Index, parent: Index
    ) -> tuple[Floats, Floats]:
        """Price per byte and latency between every new stage and the one behind it."""
        places, place = np.unique(labels.place, return_inverse=True)
        prices = np.zeros((2, len(moves), len(places)))
        for k in np.unique(move):
            for p, number in enumerate(places):
                # The one suffix of no stages has no place, and nothing enters it.
                if any(self._places[number]):
                    prices[:, k, p] = self._machines.hop(moves[k].step.taken, self._places[number])
        return prices[0][move, place[parent]], prices[1][move, place[parent]]

    def _valued(self, added: Labels, moves: list[Move]) -> Labels:
        """The same with T_PL, hope and lower bound."""
        tables = self._tables
        closed = np.empty(len(added))
        for k, part in _segments(added.move):
            closed[part] = self._closed_s(added.take(part), moves[k].target, moves[k].free)
        free = np.array([each.free for each in moves])[added.move]
        steady = tables.num_microbatches - 1
        suffix = added.suffix
        average = tables.work_s[added.start] / free
        rest, rest_back = tables.least_both_s[added.start], tables.least_backward_s[added.start]
        least = np.maximum(
            tables.num_microbatches * np.maximum(added.peak_s, average),
            steady * suffix.pivot_s + suffix.between_s + rest,
        )
        stays = suffix.warm_s + steady * suffix.pivot_s
        stays = stays + np.maximum(suffix.ending_s, suffix.back_s + rest_back)
        moves_on = steady * average + np.maximum(suffix.behind_s, rest_back)
        on = steady * average > steady * suffix.pivot_s + suffix.between_s
        hoped = np.maximum(least, np.where(on, moves_on, stays) + rest - rest_back)
        return replace(added, closed_s=closed, hoped_s=hoped, least_s=least)

    def _closed_s(self, added: Labels, target: int, free: int) -> Floats:
        """T_PL of suffixes that lead to one state."""
        tables = self._tables
        k = int(tables.index[free])
        if k < 0:
            return np.full(len(added), np.inf)
        used = self._states[target]
        rest = self._machines.rest(used)
        everything = np.arange(len(added))
        hops = np.array(
            [
                self._machines.hop(rest, self._places[place]) if sum(used) else (0.0, 0.0)
                for place in added.place[:1]
            ]
        )
        there, back = _transfer(added, everything, hops[:, 0], hops[:, 1])
        ring = tables.reduce_s(free, *self._machines.ring(rest))
        suffix = added.suffix.prepend(there, back, 0.0, tables.num_microbatches)
        suffix = suffix.prepend(
            tables.forward_s[k, added.start],
            tables.backward_s[k, added.start],
            ring[0, added.start],
            tables.num_microbatches,
        )
        fits = tables.headroom[k, 0, added.start] >= added.stages
        fits &= added.stages < self._max_stages
        return np.where(fits, suffix.latency_s(tables.num_microbatches), np.inf)

    def _consider(self, added: Labels) -> None:
        """Remember the best plans, per number of stages."""
        for stages in np.unique(added.stages):
            alike = np.flatnonzero(added.stages == stages)
            best = added.take(alike[[added.closed_s[alike].argmin()]])
            known = self._best.get(int(stages))
            if known is None or best.closed_s[0] < known.closed_s[0]:
                self._best[int(stages)] = best
                self._limit_s = min(self._limit_s, float(best.closed_s[0]))

    def _chain(self, first: Labels) -> Chain:
        """The plan whose first stage takes what this suffix leaves."""
        starts, steps = [], []
        label, latency_s = first, float(first.closed_s[0])
        while label.source[0] >= 0:
            source = int(label.source[0])
            starts.append(int(label.start[0]))
            steps.append(self._moves[source][int(label.move[0])].step)
            label = self._settled[source].take(label.parent)
        devices = self._machines.devices(steps[::-1])[::-1]
        return Chain(latency_s, (0, *starts, self._tables.terms.row.size), tuple(devices))


def _transfer(
    labels: Labels, chosen: Index, per_byte: Floats, latency_s: Floats
) -> tuple[Floats, Floats]:
    """Seconds of the hop into some suffixes and back; nothing where no byte flows."""
    there, back = labels.entering[chosen], labels.gradients[chosen]
    return (
        np.where(there > 0, there * per_byte + latency_s, 0.0),
        np.where(back > 0, back * per_byte + latency_s, 0.0),
    )


def _segments(move: Index) -> Iterator[tuple[int, Index]]:
    """Every move with the positions at which it stands; ``move`` ascends."""
    for k in np.unique(move):
        first, last = np.searchsorted(move, [k, k + 1])
        yield int(k), np.arange(first, last)


def _numbered(place: Place, known: list[Place], number: dict[Place, int]) -> int:
    if place not in number:
        number[place] = len(known)
        known.append(place)
    return number[place]
