"""Tables of a simulated step before its clock runs; ``records`` says what they hold."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np

from anabranch.compiled import Table, records
from anabranch.cost.overheads import slowdown_of
from anabranch.simulator.costs import StepCosts
from anabranch.simulator.engine import tournament
from anabranch.simulator.events import Role
from anabranch.simulator.messages import concatenated
from anabranch.simulator.program import Program
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


class SharedLists:
    """Lists of whole numbers, one behind the other.

    Args:
        first: where they begin.
    """

    def __init__(self, first: int, entries: list[int]) -> None:
        self.entries = entries
        self._first = first
        self._known: dict[tuple[int, ...], tuple[int, int]] = {}

    def add(self, entries: Sequence[int]) -> tuple[int, int]:
        """Return start and end of a list; equal lists are shared."""
        key = tuple(entries)
        if key not in self._known:
            first = self._first + len(self.entries)
            self._known[key] = first, first + len(key)
            self.entries += key
        return self._known[key]


def tables_of(program: Program, costs: StepCosts) -> Tables:
    """Everything before the clock runs."""
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
    nodes = tournament(len(hosts) + len(queues) + len(barriers) + len(shared))
    return Tables(
        clock=records(ClockRecord, [(0, 0, 0, 0, stages, 0.0, 0.0, 0.0, lost.agreement.latency_s)]),
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
    """The messages, and lists that begin with those that are posted with each other and their
    ports.
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
    """Units and their parts.

    Args:
        first_group: barriers before those of groups.
    """
    units: list[tuple[float, ...]] = []
    parts: list[tuple[float, ...]] = []
    for unit in program.units:
        group = unit.group + first_group if unit.group >= 0 else -1
        if unit.role in (Role.GATHER, Role.SHARE, Role.BEGIN):
            inside = lists.add(unit.posts or unit.ports)
        else:
            marks = unit.marks or (Mark(unit.seconds, ()),)
            inside = len(parts), len(parts) + len(marks)
            parts += [(*lists.add(mark.pieces), mark.seconds) for mark in marks]
        units.append((unit.role, unit.stage, group, *inside, unit.seconds))
    return units, parts
