"""One simulated step: its tables before the clock runs, and its events afterwards."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from anabranch.compiled import Table, records
from anabranch.cost.overheads import slowdown_of
from anabranch.schedule.schedule import Schedule
from anabranch.simulator.costs import StepCosts
from anabranch.simulator.engine import tournament
from anabranch.simulator.events import Role, play
from anabranch.simulator.messages import concatenated
from anabranch.simulator.program import ComputeUnit, Program
from anabranch.simulator.records import (
    BarrierRecord,
    ClockRecord,
    DeviceRecord,
    HostRecord,
    MessageRecord,
    NodeRecord,
    PartRecord,
    PieceRecord,
    QueueRecord,
    RunRecord,
    SumRecord,
    Tables,
    UnitRecord,
)
from anabranch.simulator.sums import Mark
from anabranch.timeline import OverheadSpan, Span, SumSpan


class SharedLists:
    """Lists of whole numbers in one array.

    Args:
        first: index of the first entry in ``Tables.lists``.
    """

    def __init__(self, first: int, entries: list[int]) -> None:
        self.entries = entries
        self._first = first
        self._known: dict[tuple[int, ...], tuple[int, int]] = {}

    def add(self, entries: Sequence[int]) -> tuple[int, int]:
        """Return start and end of a list in ``Tables.lists``; equal lists are shared."""
        key = tuple(entries)
        if key not in self._known:
            first = self._first + len(self.entries)
            self._known[key] = first, first + len(key)
            self.entries += key
        return self._known[key]


def tables_of(program: Program, costs: StepCosts) -> Tables:
    """Return the tables of a program before the clock runs."""
    messages, lists = _messages(program)
    summed = Counter(s for work in program.sums for s in work.stages)
    named = *(unit.stage for unit in program.units), *summed
    stages = 1 + max(named, default=-1)
    barriers = [(summed[s], -1, -1, 0, 0, 0) for s in range(stages)] * program.updates
    units, parts = _units(program, lists, len(barriers))
    barriers += [(0, -1, -1, *lists.add(group), len(group)) for group in program.groups]
    queues: dict[int, list[int]] = defaultdict(list)
    for piece, work in enumerate(program.sums):
        queues[work.queue].append(piece)
    summing = [lists.add(queues[q]) for q in range(len(queues))]
    hosts = [costs.host(device) for device in program.devices]
    jobs = range(1, max(Counter(hosts).values()) + 1)
    lost = costs.overheads
    slowdown = [slowdown_of(lost.slowdown, count) for count in jobs] if lost.slowdown else [1.0]
    shared = {host: h for h, host in enumerate(dict.fromkeys(hosts)) if slowdown[-1] != 1}
    used = max((port for work in costs.all_reduces() for port in work.ports), default=-1)
    sums = [
        (work.queue, *lists.add(work.ports), *lists.add(work.stages), work.seconds)
        for work in program.sums
    ]
    pieces = [(work.waits_for, -1, 0.0) for work in program.sums]
    devices = records(DeviceRecord, len(hosts))
    for field in ("unit", "part", "message", "behind", "next_job"):
        devices[field] = -1
    devices["at"], devices["stop"] = program.first[:-1], program.first[1:]
    ran = np.append(0, np.cumsum(program.entries < -program.size))
    devices["run"] = ran[program.first[:-1]]
    held = [lists.add(held) for held in program.stages]
    devices["first_stage"], devices["stop_stage"] = np.array(held).T
    devices["host"] = [shared.get(host, -1) for host in hosts]
    listed_before = len(program.entries) + len(lists.entries)
    devices["updates"] = listed_before + stages * np.arange(len(hosts))
    counts = np.zeros(stages * len(hosts), np.int64)
    nodes = tournament(len(hosts) + len(queues) + len(shared))
    return Tables(
        clock=records(ClockRecord, [(0, 0, 0, 0, stages, 0.0, 0.0, 0.0, lost.agreement_latency_s)]),
        lists=np.concatenate([program.entries, np.array(lists.entries, np.int64), counts]),
        nodes=records(NodeRecord, nodes),
        devices=devices,
        units=records(UnitRecord, units),
        parts=records(PartRecord, parts),
        messages=messages,
        barriers=records(BarrierRecord, barriers),
        sums=records(SumRecord, sums),
        queues=records(QueueRecord, [(first, stop, first, 0, 0) for first, stop in summing]),
        pieces=records(PieceRecord, pieces * program.updates),
        hosts=records(HostRecord, [(0, -1, 0.0, 0.0)] * len(shared)),
        free=np.zeros(1 + max(used, program.messages.ports.max(initial=-1))),
        speeds=np.array([0.0, *(1 / times for times in slowdown)]),
        runs=records(RunRecord, int(ran[-1])),
    )


def _messages(program: Program) -> tuple[Table[MessageRecord], SharedLists]:
    """Return the messages, and lists that begin with the receives that each message posts and the
    ports of all messages.
    """
    table, begin = concatenated([program.messages.table]), len(program.entries)
    opened = np.argsort(table["opener"], kind="stable")[np.count_nonzero(table["opener"] < 0) :]
    lists = SharedLists(begin, [*opened.tolist(), *program.messages.ports.tolist()])
    table["first"] += begin + len(opened)
    table["stop"] += begin + len(opened)
    bounds = begin + np.searchsorted(table["opener"][opened], np.arange(len(table) + 1))
    table["first_release"], table["stop_release"] = bounds[:-1], bounds[1:]
    return table, lists


def _units(
    program: Program, lists: SharedLists, first_group: int
) -> tuple[list[tuple[float, ...]], list[tuple[float, ...]]]:
    """Return the rows of units and of their parts.

    Args:
        first_group: index of the barrier of the first group.
    """
    units: list[tuple[float, ...]] = []
    parts: list[tuple[float, ...]] = []
    for unit in program.units:
        group = unit.group + first_group if unit.group >= 0 else -1
        if unit.role in (Role.GATHER, Role.BEGIN):
            inside = lists.add(unit.posts or unit.ports)
        else:
            marks = unit.marks or (Mark(unit.seconds, ()),)
            inside = len(parts), len(parts) + len(marks)
            parts += [(*lists.add(mark.pieces), mark.seconds) for mark in marks]
        units.append((unit.role, unit.stage, group, *inside, unit.seconds))
    return units, parts


_OVERHEAD_NAMES = {
    Role.OVERHEAD: "bookkeeping",
    Role.AGREEMENT: "agreement",
    Role.UPDATE: "update",
    Role.GATHER: "gather",
}


class StepRun:
    """One simulated step, or several in a row."""

    def __init__(self, program: Program, costs: StepCosts) -> None:
        self.program = program
        self._tables = tables_of(program, costs)
        play(self._tables)

    @property
    def end(self) -> float:
        """Seconds of the step."""
        return float(self._tables.clock[0].end)

    @property
    def begun(self) -> float:
        """Latest start of a step by any device."""
        return float(self._tables.clock[0].begun)

    @cached_property
    def runs(self) -> list[list[tuple[ComputeUnit, float, float]]]:
        """Units of each device with their starts and ends."""
        size, units = self.program.size, self.program.units
        times = iter(zip(*(self._tables.runs[x].tolist() for x in ("start", "end")), strict=True))
        return [
            [(units[~x - size], *next(times)) for x in code if ~x >= size]
            for code in self.program.code
        ]

    @cached_property
    def summed(self) -> list[tuple[int, float]]:
        """All-reduces in the order in which they began: (index of the piece, start)."""
        pieces = self._tables.pieces
        places = np.argsort(pieces["begun"])[len(pieces) - self._tables.clock[0].summed :]
        numbers = places % max(len(self.program.sums), 1)
        return list(zip(numbers.tolist(), pieces["start"][places].tolist(), strict=True))

    @property
    def is_done(self) -> bool:
        """Return True if all devices have finished their lists."""
        return bool((self._tables.devices["at"] == self._tables.devices["stop"]).all())

    def spans(self, schedule: Schedule) -> list[Span]:
        """Return the actions of a schedule as they happened; messages are spans at both ends."""
        computed, exchanged, moved = [], [], self.moved if schedule.is_lowered else []
        for d, device in enumerate(self.program.devices):
            runs = self.runs[d]
            times = ((start, end) for unit, start, end in runs if unit.role is Role.ACTION)
            codes = (x if x >= 0 else ~x for x in self.program.code[d])
            message = (x for x in codes if x < self.program.size)
            for action in schedule.actions[device]:
                if action.peer < 0:
                    computed.append(Span(device, *next(times), action))
                else:
                    exchanged.append(Span(device, *moved[next(message)], action))
        return computed + exchanged

    def sum_spans(self) -> Iterator[SumSpan]:
        """Generate the all-reduces, on every device that takes part."""
        for piece, start in self.summed:
            work = self.program.sums[piece]
            for device in work.devices:
                yield SumSpan(device, start, start + work.seconds, work.stages, work.nbytes)

    def overhead_spans(self) -> Iterator[OverheadSpan]:
        """Generate the time of devices besides actions."""
        for d, device in enumerate(self.program.devices):
            for unit, start, end in self.runs[d]:
                if unit.role is not Role.ACTION and end > start:
                    yield OverheadSpan(device, start, end, _OVERHEAD_NAMES[unit.role])

    @cached_property
    def _is_action(self) -> NDArray[np.bool_]:
        """True for each row of ``Tables.runs`` that is an action, not bookkeeping."""
        program, size = self.program, self.program.size
        is_action = np.array([unit.role is Role.ACTION for unit in program.units])
        return is_action[~program.entries[program.entries < -size] - size]

    @property
    def compute_s(self) -> float:
        """Seconds that all devices compute, summed."""
        runs = self._tables.runs
        return float((runs["end"] - runs["start"])[self._is_action].sum())

    @cached_property
    def last_ends(self) -> NDArray[np.float64]:
        """End of the last action of each device that computes."""
        program, chosen = self.program, self._is_action
        device = np.repeat(np.arange(len(program.devices)), np.diff(program.first))
        device = device[program.entries < -program.size]
        first = np.flatnonzero(np.diff(device[chosen], prepend=-1))
        ends: NDArray[np.float64] = np.maximum.reduceat(self._tables.runs["end"][chosen], first)
        return ends

    def memory(self, d: int) -> list[tuple[float, float]]:
        """Return (time, bytes) for memory that a device takes; negative bytes are released."""
        changes = []
        for unit, start, end in self.runs[d]:
            if unit.before:
                changes.append((start, unit.before))
            if unit.after:
                changes.append((end, -unit.after))
        return changes

    @property
    def moved(self) -> list[tuple[float, float]]:
        """Times at which each message began to occupy its ports and arrived."""
        messages = self._tables.messages
        begun = messages["freed"] - messages["occupies"]
        return list(zip(begun.tolist(), messages["arrival"].tolist(), strict=True))
