"""List schedules of a stage graph: passes get numbers, and one begins after the other, as
``zero_bubble`` says or in an order fixed for each stage (``interleaved``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from anabranch.compiled import Floats, Ints, compiled_if_worth
from anabranch.errors import InvalidScheduleError
from anabranch.plans.stages import Stage, StageGraph
from anabranch.schedule.justify import Passes, justified, links, timed
from anabranch.schedule.list_scheduler import (
    FORWARD,
    GRADIENT,
    WEIGHTS,
    ListProblem,
    ListState,
    run,
)
from anabranch.schedule.schedule import Kind, Order

SECONDS = 3.0
"""Seconds of a sample at the slowest stage: 1 s of them are its forward, by default."""

Lengths = Sequence[tuple[float, float, float, float]]
"""Per stage, seconds for a sample: of a forward, a gradient of inputs, one of weights, and a whole
backward.
"""


def lengths_of(stages: Iterable[Stage]) -> Lengths:
    """Return seconds of each kind of pass for a sample."""
    result: list[tuple[float, float, float, float]] = []
    for stage in stages:
        forward_s = stage.load * SECONDS / (1 + stage.backward_factor)
        backward_s = forward_s * stage.backward_factor
        weights_s = backward_s * stage.weight_share
        result.append((forward_s, backward_s - weights_s, weights_s, backward_s))
    return result


class ScheduledList(NamedTuple):
    """Passes in the order in which they start, and when each ends, by number."""

    order: Ints
    ends: Floats

    @property
    def end(self) -> float:
        return float(self.ends.max())


class ListPasses:
    """The passes of a stage graph: numbers of each stage's forwards, gradients of inputs (or whole
    backwards), and gradients of weights follow each other. Lanes are devices whose stages differ.

    Args:
        whole: all backwards are whole, not only those of first stages.
    """

    def __init__(self, graph: StageGraph, *, whole: bool = False) -> None:
        self.graph, stages = graph, range(len(graph))
        self._size = np.array([stage.microbatch_size for stage in graph.stages])
        self._count = np.array([graph.num_microbatches(s) for s in stages])
        self._is_first = np.array([whole or not before for before in graph.predecessors], np.int64)
        counts = np.repeat(self._count[:, None], 3, axis=1)
        counts[:, WEIGHTS] *= 1 - self._is_first
        self._number = (np.cumsum(counts) - counts.ravel()).reshape(counts.shape)
        which = np.repeat(np.arange(counts.size), counts.ravel())
        self._stage, self._kind = np.divmod(which, 3)
        self._is_whole = (self._kind == GRADIENT) & (self._is_first[self._stage] == 1)
        self._microbatch = np.arange(len(which)) - self._number.ravel()[which]
        self._first = self._microbatch * self._size[self._stage]
        self._stop = np.minimum(self._first + self._size[self._stage], graph.batch_size)
        self._lanes = [*dict.fromkeys(graph.stages_of.values())]
        own = [[at for at, lane in enumerate(self._lanes) if s in lane] for s in stages]
        beside = (sorted({t for at in own[s] for t in self._lanes[at]} - {s}) for s in stages)
        self._lane, self._beside = _rows(own), _rows(beside)
        ends = [way[s] for s in stages for way in (graph.predecessors, graph.successors)]
        self._source = _rows(ends)
        seconds = [
            self._message_s(row // 2, t) for row, row_ends in enumerate(ends) for t in row_ends
        ]
        self._source_s = np.array(seconds, np.float64)

    def scheduled(self, lengths: Lengths, orders: Sequence[Order] = ()) -> ScheduledList:
        """Begin one pass after the other.

        Args:
            orders: of each stage, where they are fixed.

        Raises:
            InvalidScheduleError: if stages wait for each other.
        """
        seconds = self.seconds(lengths)
        fixed = np.full((len(orders), max(map(len, orders), default=0)), -1)
        for row, order in zip(fixed, orders, strict=True):
            row[: len(order)] = np.where(order.columns[1] == Kind.FORWARD.number, FORWARD, GRADIENT)
        problem = ListProblem(
            self.graph.batch_size,
            self._size,
            self._count,
            np.array([stage.in_flight for stage in self.graph.stages]),
            self._is_first,
            self._size * np.array(lengths)[:, WEIGHTS],
            self._number.ravel(),
            seconds,
            *self._source,
            self._source_s,
            *self._lane,
            *self._beside,
            fixed,
        )
        stages, passes = len(self.graph), len(seconds)
        state = ListState(
            np.zeros(3 * stages, np.int64),
            np.zeros(passes),
            np.zeros(passes, np.int64),
            np.zeros(len(self._lanes)),
            np.zeros(stages),
            np.full(stages, -1),
            np.ones(stages, np.int64),
        )
        if compiled_if_worth(run, passes * stages)(problem, state) < passes:
            raise InvalidScheduleError(
                "stages wait for each other, as one of them may hold too few micro-batches for "
                "those behind it; leave in_flight out of all stages of the plan"
            )
        return ScheduledList(state.order, state.ends)

    def improved(self, schedule: ScheduledList, lengths: Lengths) -> ScheduledList:
        """Give passes these lengths, and move them if the step is shorter then."""
        seconds = self.seconds(lengths)
        ends = timed(schedule.order, seconds, self._links) + seconds
        starts = justified(schedule.order, ends, seconds, self._links)
        moved = starts + seconds
        if moved.max() >= ends.max():
            return ScheduledList(schedule.order, ends)
        order = schedule.order[np.argsort(starts[schedule.order], kind="stable")]
        return ScheduledList(order, moved)

    def seconds(self, lengths: Lengths) -> Floats:
        kind = np.where(self._is_whole, 3, self._kind)
        seconds: Floats = (self._stop - self._first) * np.array(lengths)[self._stage, kind]
        return seconds

    def most_in_flight(self, schedule: ScheduledList) -> list[int]:
        """Return per stage the micro-batches between forward and backward at most."""
        stage, kind = self._stage[schedule.order], self._kind[schedule.order]
        ends = np.where(self._is_first[stage] == 1, kind == GRADIENT, kind == WEIGHTS)
        change = (kind == FORWARD).astype(np.int64) - ends
        return [int(change[stage == s].cumsum().max()) for s in range(len(self.graph))]

    def orders(self, schedule: ScheduledList) -> dict[int, Order]:
        """Return the passes of each device; those with the same stages share one object."""
        kinds = Kind.FORWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT
        kind = np.array([kind.number for kind in kinds])[self._kind]
        kind[self._is_whole] = Kind.BACKWARD.number
        columns = np.array([self._stage, kind, self._microbatch])[:, schedule.order]
        orders = {
            stages: Order.of(*columns[:, np.isin(columns[0], stages)]) for stages in self._lanes
        }
        return {device: orders[stages] for device, stages in self.graph.stages_of.items()}

    @cached_property
    def _links(self) -> Passes:
        """Links between the passes, and the lanes of each."""
        parts: list[tuple[Ints, Ints, float]] = []
        first_source, sources = self._source
        for s, stage in enumerate(self.graph.stages):
            numbers, kinds = np.arange(self._count[s]), range(2 if self._is_first[s] else 3)
            own = [self._number[s, kind] + numbers for kind in range(3)]
            parts += [(own[kind][1:], own[kind][:-1], 0.0) for kind in kinds]
            parts += [(own[kind], own[kind - 1], 0.0) for kind in kinds[1:]]
            held = stage.in_flight
            parts.append((own[FORWARD][held:], own[kinds[-1]][: max(len(numbers) - held, 0)], 0.0))
            for kind in (FORWARD, GRADIENT):
                begin, stop = first_source[2 * s + kind : 2 * s + kind + 2]
                for t, seconds in zip(sources[begin:stop], self._source_s[begin:stop], strict=True):
                    before = -(-self._stop[own[kind]] // self._size[t]) - 1
                    parts.append((own[kind], self._number[t, kind] + before, seconds))
        passes, others = (np.concatenate([part[x] for part in parts]) for x in (0, 1))
        between = np.repeat([part[2] for part in parts], [len(part[0]) for part in parts])
        both = ((passes, others), (others, passes))
        waits, after = (links(len(self._stage), *way, between) for way in both)
        first_lane, lane = self._lane
        begin, sizes = first_lane[self._stage], np.diff(first_lane)[self._stage]
        first = np.cumsum([0, *sizes])
        lanes = lane[np.repeat(begin - first[:-1], sizes) + np.arange(first[-1])]
        return Passes(waits, after, first, lanes)

    def _message_s(self, s: int, t: int) -> float:
        """Return the seconds of a message between neighbours."""
        a, b = (self.graph.stages[x] for x in (min(s, t), max(s, t)))
        is_sent = {*a.devices} != {*b.devices}
        return a.message * a.microbatch_size * SECONDS if is_sent else 0.0


def interleaved(graph: StageGraph, orders: Sequence[Order]) -> dict[int, Order]:
    """Merge the orders of stages, with whole backwards, into one list per device: each begins what
    can start first. Two devices with two stages each, in a chain, and two micro-batches::

        device 0: stages 0, 2     0F0 0F1 2F0 2F1 .   .       2B0    2B1       0B0   0B1
        device 1: stages 1, 3     .   1F0 1F1 3F0 3B0    3F1  3B1     1B0    1B1

    A forward takes time in proportion to a replica's samples, a backward twice that. Of those that
    can start together backwards come first, because they free memory, then earlier samples.
    """
    passes = ListPasses(graph, whole=True)
    lengths = [(1 / n, 2 / n, 0.0, 2 / n) for n in (stage.replicas for stage in graph.stages)]
    return passes.orders(passes.scheduled(lengths, orders))


def _rows(rows: Iterable[Sequence[int]]) -> tuple[Ints, Ints]:
    """Return the start of each row, with the end of the last, and all rows in one array."""
    listed = [*rows]
    first = np.cumsum([0, *map(len, listed)])
    return first, np.array([number for row in listed for number in row], np.int64)
