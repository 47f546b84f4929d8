"""Compilation of a schedule without messages straight to numbers, which is all that seconds need.

``lower`` makes four actions of every message, only for ``compile_schedule`` to number them. But
what flows along a stage edge repeats itself with the micro-batches (``schedule.lower.pattern_of``),
and what a device does for a micro-batch is a row of integers::

    forward of micro-batch i     receives of every edge that enters, compute, sends of every edge
                                 that leaves
    backward of micro-batch i    likewise against the edges

So rows are filled edge by edge, then put in the order of the schedule. The program is that of
``compile_schedule(lower(schedule, ..), ..)`` but for the numbering of messages, which no result
depends on.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import NamedTuple

from anabranch.plans.stages import StageGraph
from anabranch.schedule.lower import device_pairs, pattern_of
from anabranch.schedule.schedule import Action, Kind, Schedule
from anabranch.simulator.costs import StepCosts
from anabranch.simulator.program import ComputeUnits, MessagePrices, MessageTable, Program

Rows = list[list[int]]
"""Per micro-batch, a stretch of a device's code."""


class _Run(NamedTuple):
    """MessageTable between two devices, one every period.

    Attributes:
        sender: device.
        receiver: device.
        sent: rows of the sender that send them.
        received: rows of the receiver that receive them.
        indices: of the messages.
    """

    sender: int
    receiver: int
    sent: slice
    received: slice
    indices: range


def compile_order(schedule: Schedule, graph: StageGraph, costs: StepCosts) -> Program | None:
    """The program of a schedule that has no messages yet; those of its edges are put in.

    Returns:
        None for a schedule that is not one of forwards and whole backwards, both in order, of one
        stage per device.
    """
    orders = _orders(schedule, graph)
    if orders is None:
        return None
    prices = MessagePrices(graph, costs, tuple(schedule.actions))
    numbering = _Numbering(graph, prices, schedule.slots)
    for x, y in graph.edges:
        if costs.message_edges.goes_forward((x, y)):
            numbering.add(x, y, back=False)
        if costs.message_edges.comes_back((x, y)):
            numbering.add(x, y, back=True)
    units = ComputeUnits(graph, costs, prices.index)
    table = numbering.table
    code = _code(graph, orders, units, numbering.runs, len(table.price))
    return Program(
        prices.devices, code, units.known, table, prices.ports, units.groups, units.finishes
    )


def _orders(schedule: Schedule, graph: StageGraph) -> dict[int, tuple[int, Sequence[int]]] | None:
    """Per device its stage and, in order, its rows: i for forward i, M + i for backward i."""
    stage_of: dict[int, int] = {}
    for s, stage in enumerate(graph.stages):
        for device in stage.devices:
            if stage_of.setdefault(device, s) != s:
                return None
    if stage_of.keys() != schedule.actions.keys():
        return None
    known: dict[tuple[int, int], Sequence[int] | None] = {}
    result = {}
    for device, actions in schedule.actions.items():
        s = stage_of[device]
        key = s, id(actions)
        if key not in known:
            known[key] = _order(actions, s, graph.num_microbatches(s))
        order = known[key]
        if order is None:
            return None
        result[device] = s, order
    return result


def _order(actions: Sequence[Action], stage: int, count: int) -> Sequence[int] | None:
    forward, backward = 0, count
    is_forward, is_backward = Kind.FORWARD, Kind.BACKWARD
    result = []
    for action in actions:
        kind, i = action.kind, action.microbatch
        if action.stage != stage:
            return None
        if kind is is_forward and i == forward:
            result.append(forward)
            forward += 1
        elif kind is is_backward and i == backward - count:
            result.append(backward)
            backward += 1
        else:
            return None
    return result if forward == count and backward == 2 * count else None


class _Flow(NamedTuple):
    """One message of a period: from micro-batch i of stage x on device a to micro-batch j of stage
    y on device b, or back.
    """

    i: int
    j: int
    a: int
    b: int
    samples: int


class _Numbering:
    """Numbers the messages of stage edges, those of one edge in the order of their samples.

    Attributes:
        table: all messages.
        runs: all messages, by edge.
    """

    def __init__(self, graph: StageGraph, prices: MessagePrices, slots: int) -> None:
        self.table = MessageTable()
        self.runs: list[_Run] = []
        self._graph, self._prices, self._slots = graph, prices, slots

    def add(self, x: int, y: int, *, back: bool) -> None:
        """Number one direction of stage edge x -> y."""
        source, target = self._graph.stages[x], self._graph.stages[y]
        unit, pattern, whole, rest = pattern_of(self._graph, x, y)
        per_x, per_y = unit // source.microbatch_size, unit // target.microbatch_size
        channels: dict[tuple[int, int], list[list[list[range]]]] = defaultdict(list)
        for overlaps, before, times in ((pattern, 0, whole), (rest, whole, 1)):
            flows = [
                _Flow(i + before * per_x, j + before * per_y, a, b, stop - start)
                for i, r, j, q, start, stop in overlaps
                for a, b in device_pairs(source, r, target, q, back=back)
                if a != b
            ]
            indices = self._number(x, y, flows, times, back=back)
            self._run(x, y, flows, indices, (per_x, per_y), back=back)
            received: dict[tuple[int, int], dict[int, list[range]]] = defaultdict(dict)
            for flow, mine in zip(flows, indices, strict=True):
                microbatch = flow.i if back else flow.j
                received[flow.a, flow.b].setdefault(microbatch, []).append(mine)
            for pair, microbatches in received.items():
                channels[pair].append(list(microbatches.values()))
        for parts in channels.values():
            _post(self.table, parts, self._slots)

    def _number(
        self, x: int, y: int, flows: Sequence[_Flow], times: int, *, back: bool
    ) -> list[range]:
        """Indices of each flow, one for each repetition."""
        price = self._prices.price
        first = self.table.add(
            [
                price(y, x, b, a, False, samples) if back else price(x, y, a, b, True, samples)
                for _, _, a, b, samples in flows
            ],
            times,
        )
        stop = first + len(flows) * times
        return [range(first + p, stop, len(flows)) for p in range(len(flows))]

    def _run(
        self,
        x: int,
        y: int,
        flows: Sequence[_Flow],
        indices: Sequence[range],
        per_period: tuple[int, int],
        *,
        back: bool,
    ) -> None:
        rows_x, rows_y = (self._graph.num_microbatches(s) if back else 0 for s in (x, y))
        per_x, per_y = per_period
        for (i, j, a, b, _), mine in zip(flows, indices, strict=True):
            at_x, at_y = slice(rows_x + i, None, per_x), slice(rows_y + j, None, per_y)
            run = _Run(b, a, at_y, at_x, mine) if back else _Run(a, b, at_x, at_y, mine)
            self.runs.append(run)


def _post(table: MessageTable, parts: Sequence[Sequence[Sequence[range]]], slots: int) -> None:
    """Decide when the receives of one channel are posted.

    Args:
        table: of the messages.
        parts: what repeats and what is left over; each per micro-batch of the receiver in one
            period, each of these as runs.
        slots: micro-batches whose receives may be posted.
    """
    if len(parts) == 1 and len(parts[0]) == 1 and len(parts[0][0]) == 1:
        table.post_singly(parts[0][0][0], slots)
        return
    groups: list[Sequence[int]] = []
    for part in parts:
        # Period after period, micro-batch after micro-batch.
        groups += chain.from_iterable(
            zip(*(zip(*microbatch, strict=True) for microbatch in part), strict=True)
        )
    table.post(groups, slots)


def _code(
    graph: StageGraph,
    orders: dict[int, tuple[int, Sequence[int]]],
    units: ComputeUnits,
    runs: Sequence[_Run],
    first_unit: int,
) -> list[list[int]]:
    """Per device its rows, in the order of the schedule."""
    rows: dict[int, Rows] = {
        device: [[] for _ in range(2 * graph.num_microbatches(s))]
        for device, (s, _) in orders.items()
    }
    for run in runs:
        _append(rows[run.receiver][run.received], run.indices)
    for s, stage in enumerate(graph.stages):
        for device in stage.devices:
            mine = _units(graph, s, device, units)
            _append(rows[device], [~(first_unit + unit) for unit in mine])
    for run in runs:
        indices = run.indices
        _append(rows[run.sender][run.sent], range(~indices.start, ~indices.stop, -indices.step))
    return [
        list(chain.from_iterable(map(rows[device].__getitem__, order)))
        for device, (_, order) in orders.items()
    ]


def _append(rows: Rows, codes: Iterable[int]) -> None:
    """One code to each row; there may be more rows."""
    deque(map(list.append, rows, codes), maxlen=0)  # a loop, but in C


def _units(graph: StageGraph, s: int, device: int, units: ComputeUnits) -> list[int]:
    """ComputeUnits of the forwards, then of the backwards, of a stage on one device."""
    last = graph.num_microbatches(s) - 1
    result = []
    for kind in (Kind.FORWARD, Kind.BACKWARD):
        if last:
            result += [units.unit_of(Action(s, kind, 0), device, False)] * last
        result.append(units.unit_of(Action(s, kind, last), device, kind is Kind.BACKWARD))
    return result
