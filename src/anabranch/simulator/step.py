"""One simulated step: its tables, and what has happened when the clock has run.

The clock runs as machine code where there is some by now, else as plain Python on lists: that takes
as long for a small step as to fetch the code, and nobody waits for its compilation. Both do the
same to the last bit.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import accumulate
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from anabranch import jit
from anabranch.cost.overheads import lost_share, slowdown_of
from anabranch.schedule.schedule import Schedule
from anabranch.simulator.costs import StepCosts
from anabranch.simulator.engine import tournament
from anabranch.simulator.events import Role, play
from anabranch.simulator.program import ComputeUnit, Program
from anabranch.simulator.records import (
    BARRIER,
    CLOCK,
    DEVICE,
    HOST,
    MESSAGE,
    NODE,
    PART,
    PIECE,
    QUEUE,
    RUN,
    SUM,
    UNIT,
    Tables,
    listed,
)
from anabranch.timeline import OverheadSpan, Span, SumSpan

_WHAT = {
    Role.OVERHEAD: "bookkeeping",
    Role.AGREEMENT: "agreement",
    Role.UPDATE: "update",
    Role.GATHER: "gather",
}

FETCHED, COMPILED = 5_000, 100_000
"""Entries of lists that a process simulates in plain Python before it fetches the machine code, as
long as that takes; and where none is kept, before it begins to compile it: some seconds.
"""

_played = 0


def prepare() -> None:
    """Begin to compile the clock beside all else."""
    tables = *(CLOCK, np.int64, NODE, DEVICE, UNIT, PART, MESSAGE, BARRIER, SUM, QUEUE, PIECE), HOST
    jit.begin((play, [Tables(*(np.zeros(0, t) for t in (*tables, *(float,) * 3, RUN)))]), nice=10)


def _is_compiled(tables: Tables) -> bool:
    """Whether there is machine code by now; otherwise its compilation has begun, if it pays."""
    # A machine that has no room for files or processes has plain Python.
    with suppress(OSError):
        if _played > FETCHED and jit.is_there(play, tables):
            return True
        if _played > COMPILED:
            jit.begin((play, (tables,)))
    return False


class Step:
    """One simulated step; several in a row are one as well."""

    def __init__(self, program: Program, costs: StepCosts) -> None:
        self.program = program
        self._tables = _tables(program, costs)

    def run(self) -> None:
        """Start every device and go on until nothing happens."""
        global _played
        _played += len(self.program.entries)
        if _is_compiled(self._tables):
            play(self._tables)
            return
        lists = Tables(*map(listed, self._tables))
        jit.plain(play)(lists)
        for table, rows in zip(self._tables, lists, strict=True):
            names = table.dtype.names
            table[:] = rows if names is None else [attrgetter(*names)(row) for row in rows]

    @property
    def end(self) -> float:
        """Seconds of the step."""
        return float(self._tables.clock["end"][0])

    @property
    def begun(self) -> float:
        """Of several steps, when a device last began one."""
        return float(self._tables.clock["begun"][0])

    @cached_property
    def starts(self) -> list[list[float]]:
        """Per device of its computes, updates among them."""
        return self._by_device("start")

    @cached_property
    def ends(self) -> list[list[float]]:
        """Likewise."""
        return self._by_device("end")

    def _by_device(self, field: str) -> list[list[float]]:
        counts = accumulate(map(len, self.units))
        return [part.tolist() for part in np.split(self._tables.runs[field], list(counts)[:-1])]

    @cached_property
    def summed(self) -> list[tuple[int, float]]:
        """Per all-reduce of a piece, its index and when it began."""
        pieces = self._tables.pieces
        places = np.argsort(pieces["begun"])[len(pieces) - int(self._tables.clock["summed"][0]) :]
        numbers = places % max(len(self.program.sums), 1)
        return list(zip(numbers.tolist(), pieces["start"][places].tolist(), strict=True))

    def _reached(self) -> list[list[int]]:
        """Per device, the part of its code that is done."""
        devices = self._tables.devices
        return [
            code[: len(code) - left]
            for code, left in zip(self.program.code, devices["stop"] - devices["at"], strict=True)
        ]

    @property
    def is_done(self) -> bool:
        """Whether all devices are through their lists."""
        return bool((self._tables.devices["at"] == self._tables.devices["stop"]).all())

    def positions(self) -> list[int]:
        """Per device, how many of its actions are done."""
        return [sum(map(self._is_action, code)) for code in self._reached()]

    def spans(self, schedule: Schedule) -> list[Span]:
        """The actions of a schedule as they happened; messages are spans at both ends."""
        computed, exchanged, moved = [], [], self.moved if schedule.is_lowered else []
        for d, device in enumerate(self.program.devices):
            clock = zip(self.units[d], self.starts[d], self.ends[d], strict=True)
            times = ((start, end) for unit, start, end in clock if unit.role is Role.ACTION)
            codes = (x if x >= 0 else ~x for x in self.program.code[d])
            message = (x for x in codes if x < self.program.size)
            for action in schedule.actions[device]:
                if action.peer < 0:
                    computed.append(Span(device, *next(times), action))
                else:
                    exchanged.append(Span(device, *moved[next(message)], action))
        return computed + exchanged

    def sum_spans(self) -> Iterator[SumSpan]:
        """The all-reduces, on every device that takes part."""
        for piece, start in self.summed:
            work = self.program.sums[piece]
            for device in work.devices:
                yield SumSpan(device, start, start + work.seconds, work.stages, work.nbytes)

    def overhead_spans(self) -> Iterator[OverheadSpan]:
        """What devices did besides their actions."""
        for d, device in enumerate(self.program.devices):
            clock = zip(self.units[d], self.starts[d], self.ends[d], strict=True)
            for unit, start, end in clock:
                if unit.role is not Role.ACTION and end > start:
                    yield OverheadSpan(device, start, end, _WHAT[unit.role])

    def logs(self) -> list[tuple[NDArray[np.float64], NDArray[np.bool_]]]:
        """Per device in the order of its list, when what it receives arrived and what it computes
        ended, and which of these are computes.
        """
        arrival, first = self._tables.messages["arrival"], len(self._tables.messages)
        logged = np.array([unit.role in (Role.ACTION, Role.UPDATE) for unit in self.program.units])
        result = []
        for entries, ends in zip(self.program.code, self.ends, strict=True):
            code = np.array(entries)
            code = code[(code >= 0) | (code <= ~first)]  # without sends
            chosen = np.ones(len(code), dtype=bool)
            chosen[code < 0] = logged[~code[code < 0] - first]
            computes = (code < 0)[chosen]
            times = np.empty(len(computes))
            times[computes] = np.array(ends)[chosen[code < 0]]
            code = code[chosen]
            times[~computes] = arrival[code[~computes]]
            result.append((times, computes))
        return result

    @property
    def updating(self) -> set[int]:
        """Devices that wait for sums or update something."""
        return {
            device
            for d, device in enumerate(self.program.devices)
            if any(unit.role is Role.UPDATE for unit in self.units[d])
        }

    def memory(self, d: int) -> list[tuple[float, float]]:
        """When a device took or released how many bytes."""
        changes = []
        for unit, start, end in zip(self.units[d], self.starts[d], self.ends[d], strict=True):
            if unit.before:
                changes.append((start, unit.before))
            if unit.after:
                changes.append((end, -unit.after))
        return changes

    @cached_property
    def units(self) -> list[list[ComputeUnit]]:
        """Per device, what ``starts`` and ``ends`` are of."""
        first, units = self.program.size, self.program.units
        return [[units[~x - first] for x in code if ~x >= first] for code in self.program.code]

    @property
    def moved(self) -> list[tuple[float, float]]:
        """Per message, when it began to occupy its ports, and when it had arrived."""
        messages = self._tables.messages
        begun = messages["freed"] - messages["occupies"]
        return list(zip(begun.tolist(), messages["arrival"].tolist(), strict=True))

    def _is_action(self, x: int) -> bool:
        unit = ~x - len(self._tables.messages)
        return unit < 0 or self.program.units[unit].role is Role.ACTION


class _Lists:
    """Lists of whole numbers, one behind the other.

    Args:
        first: where they begin.
    """

    def __init__(self, first: int, entries: list[int]) -> None:
        self.entries = entries
        self._first = first
        self._known: dict[tuple[int, ...], tuple[int, int]] = {}

    def add(self, entries: Sequence[int]) -> tuple[int, int]:
        """Where such a list begins and ends; equal ones are one, as nobody changes them."""
        key = tuple(entries)
        if key not in self._known:
            first = self._first + len(self.entries)
            self._known[key] = first, first + len(key)
            self.entries += key
        return self._known[key]


def _tables(program: Program, costs: StepCosts) -> Tables:
    """Everything before the clock runs."""
    messages, lists = _messages(program)
    summed = Counter(s for work in program.sums for s in work.stages)
    # A list by hand may lack a stage whose gradients are summed nevertheless.
    named = *(unit.stage for unit in program.units), *summed
    stages = 1 + max(named, default=-1)
    barriers = [(summed[s], -1, -1, 0, 0, 0) for s in range(stages)] * program.updates
    units, parts = _units(program, lists, len(barriers), costs)
    barriers += [(0, -1, -1, *lists.add(group), len(group)) for group in program.groups]
    queues: dict[int, list[int]] = defaultdict(list)
    for piece, work in enumerate(program.sums):
        queues[work.queue].append(piece)
    summing = [lists.add(queues[q]) for q in range(len(queues))]
    hosts = [costs.host(device) for device in program.devices]
    jobs = range(1, max(Counter(hosts).values()) + 1)
    slowdown = [slowdown_of(costs.slowdown, count) for count in jobs] if costs.slowdown else [1.0]
    shared = {host: h for h, host in enumerate(dict.fromkeys(hosts)) if slowdown[-1] != 1}
    sums = [
        (work.queue, *lists.add(work.ports), *lists.add(work.stages), work.seconds)
        for work in program.sums
    ]
    devices = np.zeros(len(hosts), DEVICE)
    for field in ("unit", "part", "message", "behind", "next_job"):
        devices[field] = -1
    devices["at"], devices["stop"] = program.first[:-1], program.first[1:]
    ran = np.append(0, np.cumsum(program.entries < -program.size))
    devices["run"] = ran[program.first[:-1]]
    held = [lists.add(held) for held in program.stages]
    devices["first_stage"], devices["stop_stage"] = np.array(held).T
    devices["host"] = [shared.get(host, -1) for host in hosts]
    devices["core"], cores = _cores_of(hosts, costs.cores)
    listed_before = len(program.entries) + len(lists.entries)
    devices["updates"] = listed_before + stages * np.arange(len(hosts))
    counts = np.zeros(stages * len(hosts), np.int64)
    nodes = tournament(len(hosts) + len(queues) + len(barriers) + len(shared))
    return Tables(
        clock=np.array(
            [(0, 0, 0, 0, stages, cores, 0.0, 0.0, 0.0, costs.agreement_s, costs.crowded_s)], CLOCK
        ),
        lists=np.concatenate([program.entries, np.array(lists.entries, np.int64), counts]),
        nodes=np.array(nodes, NODE),
        devices=devices,
        units=np.array(units, UNIT),
        parts=np.array(parts, PART),
        messages=messages,
        barriers=np.array(barriers, BARRIER),
        sums=np.array(sums, SUM),
        queues=np.array([(first, stop, first, 0, 0) for first, stop in summing], QUEUE),
        pieces=np.array([(w.waits_for, -1, 0.0) for w in program.sums] * program.updates, PIECE),
        hosts=np.array([(0, -1, 0.0, 0.0)] * len(shared), HOST),
        free=np.zeros(len(program.ports)),
        speeds=np.array([0.0, *(1 / times for times in slowdown)]),
        restarts=np.array(costs.restarts, np.float64),
        runs=np.zeros(ran[-1], RUN),
    )


def _messages(program: Program) -> tuple[NDArray[np.void], _Lists]:
    """The messages, and lists that begin with those that are posted with each other."""
    found, opener = program.messages, program.messages.opener
    opened = np.argsort(opener, kind="stable")[np.count_nonzero(opener < 0) :]
    lists = _Lists(len(program.entries), opened.tolist())
    prices = [
        (*lists.add(price.ports), 0, 0, 0, 0, 0, *price[:2], 0, math.inf) for price in found.prices
    ]
    table = np.array(prices, MESSAGE)[found.price]
    bounds = len(program.entries) + np.searchsorted(opener[opened], np.arange(program.size + 1))
    table["first_release"], table["stop_release"] = bounds[:-1], bounds[1:]
    table["ready"], table["waiter"] = found.is_posted, -1
    return table, lists


def _units(
    program: Program, lists: _Lists, first_group: int, costs: StepCosts
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
            inside = len(parts), len(parts) + len(unit.marks) + 1
            parts += [(*lists.add(mark.pieces), mark.seconds) for mark in unit.marks]
            parts.append((*lists.add(unit.final), unit.rest if unit.marks else unit.seconds))
        lost = (lost_share(unit.seconds, s) for s in (costs.restart_work_s, costs.crowded_work_s))
        units.append((unit.role, unit.stage, group, *inside, unit.seconds, *lost))
    return units, parts


def _cores_of(hosts: Sequence[int], cores: int) -> tuple[list[int], int]:
    """Per device whose core it has: its own, or the first one's of its host where those have to
    share; and how many may work there at a time.
    """
    if not cores or max(Counter(hosts).values()) <= cores:
        return list(range(len(hosts))), 1
    return [hosts.index(host) for host in hosts], cores
