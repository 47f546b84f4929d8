"""Compile a schedule without messages straight to numbers: what only asks for seconds needs no more.

``lower`` makes four actions of every message, only for ``compile_schedule`` to number them. But what
flows along a stage edge repeats itself with the micro-batches (``schedule.lower.pattern_of``), and
what a device does for a micro-batch is a row of integers::

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

from anabranch.planner.stages import StageGraph
from anabranch.schedule.lower import device_pairs, pattern_of
from anabranch.schedule.schedule import Action, Kind, Schedule
from anabranch.simulator.costs import Edges, StepCosts
from anabranch.simulator.program import Messages, Prices, Program, Units

Rows = list[list[int]]
"""Per micro-batch, a stretch of a device's code."""


class _Run(NamedTuple):
    """Messages between two devices, one every period.

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
    prices = Prices(graph, costs, tuple(schedule.actions))
    table = Messages()
    runs: list[_Run] = []
    for x, y in graph.edges:
        if _is_in((x, y), costs.data_edges):
            runs += _edge(graph, (x, y), False, table, prices, schedule.slots)
            if _is_in((x, y), costs.gradient_edges):
                runs += _edge(graph, (x, y), True, table, prices, schedule.slots)
    units = Units(graph, costs, prices.index)
    code = _code(graph, orders, units, runs, len(table.price))
    return Program(
        prices.devices, code, units.known, table, prices.ports, units.groups, units.finishes
    )


def _is_in(edge: tuple[int, int], edges: Edges | None) -> bool:
    return edges is None or edge in edges


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


def _edge(
    graph: StageGraph,
    edge: tuple[int, int],
    back: bool,
    table: Messages,
    prices: Prices,
    slots: int,
) -> list[_Run]:
    """Number the messages of one direction of a stage edge, in the order of their samples."""
    x, y = edge
    source, target = graph.stages[x], graph.stages[y]
    unit, pattern, whole, rest = pattern_of(graph, x, y)
    per_x, per_y = unit // source.microbatch_size, unit // target.microbatch_size
    rows_x, rows_y = (graph.num_microbatches(s) if back else 0 for s in edge)
    runs: list[_Run] = []
    channels: dict[tuple[int, int], list[list[list[range]]]] = defaultdict(list)
    for overlaps, before, times in ((pattern, 0, whole), (rest, whole, 1)):
        flows = [
            (i + before * per_x, j + before * per_y, *pair, stop - start)
            for i, r, j, q, start, stop in overlaps
            for pair in device_pairs(source, r, target, q, back=back)
            if pair[0] != pair[1]
        ]
        first = table.add(
            [
                prices.of(y, x, b, a, False, n) if back else prices.of(x, y, a, b, True, n)
                for _, _, a, b, n in flows
            ],
            times,
        )
        stop, step = first + len(flows) * times, max(len(flows), 1)
        received: dict[tuple[int, int], dict[int, list[range]]] = defaultdict(dict)
        for p, (i, j, a, b, _) in enumerate(flows):
            indices = range(first + p, stop, step)
            at_x, at_y = slice(rows_x + i, None, per_x), slice(rows_y + j, None, per_y)
            runs.append(_Run(b, a, at_y, at_x, indices) if back else _Run(a, b, at_x, at_y, indices))
            received[a, b].setdefault(i if back else j, []).append(indices)
        for pair, microbatches in received.items():
            channels[pair].append(list(microbatches.values()))
    for parts in channels.values():
        _post(table, parts, slots)
    return runs


def _post(table: Messages, parts: Sequence[Sequence[Sequence[range]]], slots: int) -> None:
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
    units: Units,
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
            _append(rows[device], [~(first_unit + unit) for unit in _units(graph, s, device, units)])
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


def _units(graph: StageGraph, s: int, device: int, units: Units) -> list[int]:
    """Units of the forwards, then of the backwards, of a stage on one device."""
    last = graph.num_microbatches(s) - 1
    result = []
    for kind in (Kind.FORWARD, Kind.BACKWARD):
        if last:
            result += [units.of(Action(s, kind, 0), device, False)] * last
        result.append(units.of(Action(s, kind, last), device, kind is Kind.BACKWARD))
    return result
