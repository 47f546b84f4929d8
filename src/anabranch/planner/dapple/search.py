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

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from anabranch.cost.communication import transfer_s
from anabranch.cost.nested_weights import Floats
from anabranch.planner.dapple.labels import Index, Labels, best_of_groups, joined, labels, suffix_of
from anabranch.planner.dapple.moves import Moves, PlaceNumbers
from anabranch.planner.dapple.objective import NOTHING
from anabranch.planner.dapple.placement import Machines
from anabranch.planner.dapple.tables import Tables
from anabranch.planner.toolkit.budget import Budget

EXACT = 1 + 1e-9
"""Room for rounding when a bound is compared with a latency."""

BREADTH = 4
"""Of all states with as many devices in use, this many times as many suffixes are kept per cut as
of one state: how the machines are filled matters less than how many devices are left."""

CHUNK = 400_000
"""Suffixes that are priced in one go, about; each takes about 300 bytes."""


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
        tables: Tables,
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
        self._places = PlaceNumbers(machines.empty)
        self._settled: dict[int, Labels] = {}
        self._moves: dict[int, Moves] = {}
        self._pending: dict[int, list[Labels]] = defaultdict(list)
        self._best: dict[int, Labels] = {}

    def run(self) -> list[ChainPlan]:
        """The best plan and the best of other numbers of stages that came up, least L first."""
        # The one suffix of no stages, before which everything is data parallel.
        size, least_s = len(self._tables.problem.order), self._data_parallel_s()
        start = labels(NOTHING, start=size, source=-1, closed_s=least_s)
        self._consider(start)
        self._pending[0].append(start)
        for in_use in range(self._machines.cluster.num_devices):
            states = [s for s in self._pending if sum(self._places.places[s]) == in_use]
            states.sort(key=lambda s: self._places.places[s])
            for state in states:
                self._settle(state)
            self._thin_out(states)
            for state in states:
                self._extend(state)
        found = [label for label in self._best.values() if label.closed_s[0] < np.inf]
        return [self._chain(label) for label in sorted(found, key=lambda label: label.closed_s[0])]

    def _settle(self, state: int) -> None:
        found = joined(self._pending.pop(state))
        found = found[found.least_s <= self._limit_s * EXACT]
        if self._width is not None and len(found):
            found = found[best_of_groups(found, found.start, self._width)]
        self._settled[state] = found

    def _thin_out(self, states: list[int]) -> None:
        """Of all states with as many devices in use, keep the best suffixes of every cut."""
        if self._width is None or len(states) < 2:
            return
        together = joined([self._settled[state] for state in states])
        if len(together):
            kept = np.zeros(len(together), dtype=np.bool_)
            kept[best_of_groups(together, together.start, BREADTH * self._width)] = True
            for state in states:
                own, kept = np.split(kept, [len(self._settled[state])])
                self._settled[state] = self._settled[state][own]

    def _extend(self, state: int) -> None:
        """All ways to add a stage in front of the suffixes of a state, some at a time."""
        behind = self._settled[state]
        if not len(behind):
            return
        moves = Moves(self._places.places[state], self._machines, self._tables, self._places)
        self._moves[state] = moves
        first, count = self._starts(behind, moves)
        begin, suffixes = 0, count.sum(axis=1)
        while begin < len(moves):
            end = begin + 1
            while end < len(moves) and suffixes[begin : end + 1].sum() <= CHUNK:
                end += 1
            self._add(state, begin, first[begin:end], count[begin:end])
            begin = end

    def _starts(self, behind: Labels, moves: Moves) -> tuple[Index, Index]:
        """Per move and suffix the first operator at which a stage may begin, and how many may.

        Neither it nor the average of those to come takes longer than a period of the best plan.
        """
        tables = self._tables
        period = self._limit_s * EXACT / tables.num_microbatches
        low = np.maximum(1, -(-moves.free // tables.degrees[-1]))[:, None]
        high = np.searchsorted(tables.work_s, period * moves.free, side="right")[:, None] - 1
        times = [tables.both_s[k] for k in moves.degree]
        reach = [np.searchsorted(time, time[behind.start] - period) for time in times]
        first = np.maximum(low, np.reshape(reach, (len(moves), len(behind))))
        last = np.minimum(high, behind.start - 1)
        return first, np.maximum(last - first + 1, 0)

    def _add(self, state: int, begin: int, first: Index, count: Index) -> None:
        """Price the suffixes with one more stage and hand them to the states they lead to."""
        total = int(count.sum())
        self._budget.spend(total)
        if not total:
            return
        behind, moves = self._settled[state], self._moves[state]
        starts = count.ravel()
        pair = np.repeat(np.arange(starts.size), starts)
        before = np.repeat(np.cumsum(starts) - starts, starts)
        start = first.ravel()[pair] + np.arange(total) - before
        move, parent = np.divmod(pair, len(behind))
        move += begin
        room = self._tables.headroom[moves.degree[move], start, behind.start[parent]]
        fits = room >= behind.stages[parent]
        added = self._prepended(state, move[fits], parent[fits], start[fits])
        self._consider(added)
        added = added[added.least_s <= self._limit_s * EXACT]
        if self._width is not None and len(added):
            group = moves.target[added.move] * len(self._tables.problem.row) + added.start
            added = added[best_of_groups(added, group, self._width)]
        target = moves.target[added.move]
        for number in np.unique(target).tolist():
            self._pending[number].append(added[target == number])

    def _prepended(self, state: int, move: Index, parent: Index, start: Index) -> Labels:
        """Suffixes of a state with one more stage in front."""
        tables, moves, count = self._tables, self._moves[state], self._tables.num_microbatches
        per_byte, latency_s = self._hops(self._settled[state], moves)
        price = per_byte[move, parent], latency_s[move, parent]
        behind = self._settled[state][parent]
        degree, stop = moves.degree[move], behind.start
        forward = tables.forward_s[degree, stop] - tables.forward_s[degree, start]
        backward = tables.backward_s[degree, stop] - tables.backward_s[degree, start]
        reduce_s = np.empty(len(move))
        for k in np.unique(move):
            part = slice(*np.searchsorted(move, [k, k + 1]))
            reduce_s[part] = moves.ring(k)[start[part], stop[part]]
        there = transfer_s(behind.entering, *price)
        back = transfer_s(behind.gradients, *price)
        suffix = suffix_of(behind).prepend(there, back, 0.0, count)
        added = labels(
            suffix.prepend(forward, backward, reduce_s, count),
            len(move),
            start=start,
            stages=behind.stages + 1,
            place=moves.place[move],
            source=state,
            parent=parent,
            move=move,
            entering=tables.entering[start, stop],
            gradients=tables.gradients[start, stop],
            peak_s=np.maximum(np.maximum(behind.peak_s, there + back), forward + backward),
        )
        self._value(added, moves)
        return added

    def _hops(self, behind: Labels, moves: Moves) -> tuple[Floats, Floats]:
        """Price per byte and latency between every new stage and the one behind: [move, label]."""
        numbers, place = np.unique(behind.place, return_inverse=True)
        if not numbers[0]:
            # The one suffix of no stages is nowhere, and nothing enters it.
            return np.zeros((len(moves), 1)), np.zeros((len(moves), 1))
        per_byte, latency_s = moves.hops([self._places.places[n] for n in numbers])
        return per_byte[:, place], latency_s[:, place]

    def _value(self, added: Labels, moves: Moves) -> None:
        """Fill in T_PL, hope and lower bound."""
        tables = self._tables
        steady = tables.num_microbatches - 1
        suffix = suffix_of(added)
        free = moves.free[added.move]
        average = tables.work_s[added.start] / free
        rest = tables.least_both_s[free, added.start]
        rest_back = tables.least_backward_s[free, added.start]
        least = np.maximum(
            tables.num_microbatches * np.maximum(added.peak_s, average),
            steady * suffix.pivot_s + suffix.between_s,
        )
        stays = suffix.warm_s + steady * suffix.pivot_s
        stays = stays + np.maximum(suffix.ending_s, suffix.back_s + rest_back)
        moves_on = steady * average + np.maximum(suffix.behind_s, rest_back)
        on = steady * average > steady * suffix.pivot_s + suffix.between_s
        added.closed_s = self._closed_s(added, moves)
        added.hoped_s = np.maximum(least, np.where(on, moves_on, stays) + rest - rest_back)
        added.least_s = least

    def _closed_s(self, added: Labels, moves: Moves) -> Floats:
        """T_PL: all that comes before as one stage on all devices that are left."""
        tables, move, start = self._tables, added.move, added.start
        degree = moves.closing[move]
        per_byte, latency_s = (price[move] for price in moves.closing_hop)
        suffix = suffix_of(added).prepend(
            transfer_s(added.entering, per_byte, latency_s),
            transfer_s(added.gradients, per_byte, latency_s),
            0.0,
            tables.num_microbatches,
        )
        suffix = suffix.prepend(
            tables.forward_s[degree, start],
            tables.backward_s[degree, start],
            moves.closing_ring[move, start],
            tables.num_microbatches,
        )
        fits = (degree >= 0) & (tables.headroom[degree, 0, start] >= added.stages)
        return np.where(fits, suffix.latency_s(tables.num_microbatches), np.inf)

    def _data_parallel_s(self) -> float:
        """L of one stage on all devices; infinite where it does not fit."""
        tables, devices = self._tables, self._machines.cluster.num_devices
        k = int(tables.index[devices])
        if k < 0 or tables.headroom[k, 0, -1] < 0:
            return float("inf")
        ring = tables.reduce_s(self._machines.rest(self._machines.empty))
        whole = NOTHING.prepend(
            tables.forward_s[k, -1], tables.backward_s[k, -1], ring[0, -1], tables.num_microbatches
        )
        return float(whole.latency_s(tables.num_microbatches))

    def _consider(self, added: Labels) -> None:
        """Remember the best plans, per number of stages."""
        for stages in np.unique(added.stages).tolist():
            alike = np.flatnonzero(added.stages == stages)
            best = added[alike[[added.closed_s[alike].argmin()]]]
            if stages not in self._best or best.closed_s[0] < self._best[stages].closed_s[0]:
                self._best[stages] = best
                self._limit_s = min(self._limit_s, float(best.closed_s[0]))

    def _chain(self, first: Labels) -> ChainPlan:
        """The plan whose first stage takes what this suffix leaves."""
        starts, steps = [], []
        label, latency_s = first, float(first.closed_s[0])
        while label.source[0] >= 0:
            source = int(label.source[0])
            starts.append(int(label.start[0]))
            steps.append(self._moves[source].steps[int(label.move[0])])
            label = self._settled[source][label.parent]
        devices = self._machines.devices(steps[::-1])[::-1]
        return ChainPlan(latency_s, (0, *starts, len(self._tables.problem.order)), tuple(devices))
