"""The event loop of one simulated step, on integers; ``simulator.run`` says what they stand for.

It spends its time on messages, so it works on lists of plain numbers (``simulator.program``), and a
message is an event only for a device that waits for it: its arrival is known as soon as it starts
to move.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from operator import eq, length_hint

import numpy as np
from numpy.typing import NDArray

from anabranch.cost.overheads import slowdown_of
from anabranch.schedule.schedule import Schedule
from anabranch.simulator.costs import StepCosts
from anabranch.simulator.engine import Callback, Engine, SharedCores
from anabranch.simulator.program import ComputeUnit, Program, Role
from anabranch.timeline import OverheadSpan, Span, SumSpan

_WHAT = {
    Role.OVERHEAD: "bookkeeping",
    Role.AGREEMENT: "agreement",
    Role.UPDATE: "update",
    Role.GATHER: "gather",
}


class Step:
    """The state of one simulated step.

    Attributes:
        starts: per device of its computes, updates among them; ``ends`` likewise.
        begun: of several steps, when a device last began one.
        summed: per all-reduce of a piece, its index and when it began.
    """

    def __init__(self, program: Program, costs: StepCosts) -> None:
        devices, messages = len(program.devices), len(program.messages.price)
        self.program = program
        self.end = self.begun = 0.0
        self.starts: list[list[float]] = [[] for _ in range(devices)]
        self.ends: list[list[float]] = [[] for _ in range(devices)]
        self._engine = Engine()
        self._compute = self._clock(costs)
        # When a core was last at work; behind a wait it is slower at first. A device has its own
        # core; where there are not enough it takes the one that has waited least.
        self._worked, self._working = [0.0] * devices, [0] * devices
        self._core, self._cores = _cores_of(program.devices, costs)
        self._restart_s, self._pace = costs.restart_s, [1.0] * devices
        self._agreement_s, self._agreed = costs.agreement_s, 0
        self._code = [iter(code) for code in program.code]
        self._price, self._releases = program.messages.price, program.messages.releases
        self._units = program.units
        self._unit: list[ComputeUnit | None] = [None] * devices
        self._missing = [len(group) for group in program.groups]
        # Of steps in a row: how many a device has begun behind the first, and gathers that have
        # ended, with those who wait for one.
        self._begun = [0] * devices
        self._shared = [0] * len(program.groups)
        self._sharing: dict[int, list[int]] = defaultdict(list)
        # A message moves as soon as it is both sent and posted: at the second of the two.
        self._is_ready = list(program.messages.is_posted)
        self._freed = [0.0] * messages
        self._arrival = [math.inf] * messages
        self._place = [0] * messages
        self._waiter = [-1] * messages
        self._free_at = [0.0] * len(program.ports)
        self._mark = [0] * devices
        self.summed: list[tuple[int, float]] = []
        self._queues: dict[int, list[int]] = defaultdict(list)
        self._parts: Counter[int] = Counter()
        for piece, work in enumerate(program.sums):
            self._queues[work.queue].append(piece)
            self._parts.update(work.stages)
        # Pieces and updates are counted through, from update to update.
        self._is_summing = dict.fromkeys(self._queues, False)
        self._turns = dict.fromkeys(self._queues, 0)
        self._given: Counter[tuple[int, int]] = Counter()
        self._sums_of: Counter[tuple[int, int]] = Counter()
        self._updates: Counter[tuple[int, int]] = Counter()
        self._updating: dict[tuple[int, int], list[int]] = defaultdict(list)

    def _clock(self, costs: StepCosts) -> Callable[[float, Callback, int], None]:
        slowdown, hosts = costs.slowdown, [costs.host(device) for device in self.program.devices]
        if not slowdown or slowdown_of(slowdown, max(Counter(hosts).values())) == 1:
            return self._engine.after
        shared = {host: SharedCores(self._engine, slowdown) for host in set(hosts)}
        clocks = [shared[host].after for host in hosts]
        if len(shared) == 1:
            return clocks[0]
        return lambda seconds, callback, d: clocks[d](seconds, callback, d)

    def run(self) -> None:
        """Start every device and go on until nothing happens."""
        for d in range(len(self._code)):
            self._advance(d)
        self._engine.run()

    def _advance(self, d: int) -> None:
        """Go through the list of one device until it computes or has to wait."""
        now, place = self._engine.now, self._engine.place
        arrival, is_ready, transfer = self._arrival, self._is_ready, self._transfer
        count, releases = len(arrival), self._releases
        for x in self._code[d]:
            if x >= 0:
                at = arrival[x]
                if at > now or (at == now and self._place[x] > place):
                    self._waiter[x] = d
                    if at < math.inf:
                        self._engine.at_place(at, self._place[x], self._receive, x)
                    return
                for message in releases[x]:
                    if is_ready[message]:
                        transfer(message)
                    else:
                        is_ready[message] = True
            elif (message := ~x) < count:
                if is_ready[message]:
                    transfer(message)
                else:
                    is_ready[message] = True
            else:
                unit = self._unit[d] = self._units[message - count]
                if unit.role is Role.BEGIN:
                    self._unit[d] = None
                    self._begin(d, unit)
                    continue
                if unit.role is Role.SHARE:
                    self._unit[d] = None
                    self._share(unit)
                    continue
                if unit.role is Role.SHARED:
                    self._unit[d] = None
                    if self._shared[unit.group] >= self._begun[d]:
                        continue
                    self._sharing[unit.group].append(d)
                    return
                if unit.role is Role.UPDATE:
                    self._await_sums(d, unit.stage)
                elif unit.role is Role.AGREEMENT:
                    self._agree(d)
                elif unit.group < 0:
                    self._start(d)
                else:
                    self._come(unit)
                return

    def _begin(self, d: int, unit: ComputeUnit) -> None:
        """A device begins a step behind another one."""
        self.begun = self._engine.now
        self._begun[d] += 1
        for message in unit.posts:
            if self._is_ready[message]:
                self._transfer(message)
            else:
                self._is_ready[message] = True

    def _receive(self, message: int) -> None:
        """A message has arrived that a device waits for."""
        is_ready = self._is_ready
        for other in self._releases[message]:
            if is_ready[other]:
                self._transfer(other)
            else:
                is_ready[other] = True
        d, self._waiter[message] = self._waiter[message], -1
        self._advance(d)

    def _transfer(self, message: int) -> None:
        # What _occupy does, without the call.
        seconds, latency_s, ports, _, _ = self._price[message]
        engine, free_at = self._engine, self._free_at
        end = engine.now
        for port in ports:
            if free_at[port] > end:
                end = free_at[port]
        end += seconds
        for port in ports:
            free_at[port] = end
        self._freed[message] = end
        arrival = self._arrival[message] = end + latency_s
        place = self._place[message] = engine.last_place = engine.last_place + 1
        if self._waiter[message] >= 0:
            engine.at_place(arrival, place, self._receive, message)

    def _come(self, unit: ComputeUnit) -> None:
        """The last device of a replica to come to a unit starts it on all of them."""
        self._missing[unit.group] -= 1
        if self._missing[unit.group] == 0:
            members = self.program.groups[unit.group]
            self._missing[unit.group] = len(members)
            if unit.role is Role.GATHER:
                self._gather(unit, members)
                return
            for d in members:
                self._start(d)

    def _gather(self, unit: ComputeUnit, members: tuple[int, ...]) -> None:
        """Devices send each other what they have updated, on the ports of their sums."""
        start = self._occupy(unit)
        for d in members:
            self.starts[d].append(start)
            self._engine.at(start + unit.seconds, self._computed, d)

    def _share(self, unit: ComputeUnit) -> None:
        """As a gather, but nobody waits for it here."""
        self._missing[unit.group] -= 1
        if self._missing[unit.group] == 0:
            self._missing[unit.group] = len(self.program.groups[unit.group])
            self._engine.at(self._occupy(unit) + unit.seconds, self._is_shared, unit.group)

    def _is_shared(self, group: int) -> None:
        self._shared[group] += 1
        for d in self._sharing.pop(group, ()):
            self._advance(d)

    def _occupy(self, unit: ComputeUnit) -> float:
        """Take the ports of a gather as soon as all are free; when that is."""
        start = max([self._engine.now, *(self._free_at[port] for port in unit.ports)])
        for port in unit.ports:
            self._free_at[port] = start + unit.seconds
        return start

    def _start(self, d: int) -> None:
        """Start the compute of a device."""
        unit = self._unit[d]
        assert unit is not None
        now = self._engine.now
        self.starts[d].append(now)
        core = self._core[d]
        waited = now - self._worked[core] if self._working[core] < self._cores else 0.0
        self._working[core] += 1
        longer = self._restart_s(waited) if waited > 0 and unit.seconds else 0.0
        pace = self._pace[d] = 1 + longer / unit.seconds if longer else 1.0
        if unit.marks:
            self._mark[d] = 0
            self._compute(unit.marks[0].seconds * pace, self._pass_mark, d)
        else:
            self._compute(unit.seconds * pace, self._computed, d)

    def _pass_mark(self, d: int) -> None:
        """Gradients are final in the middle of a backward, which goes on."""
        unit, at = self._unit[d], self._mark[d]
        assert unit is not None
        self._mark[d] = at + 1
        if at + 1 < len(unit.marks):
            self._compute(unit.marks[at + 1].seconds * self._pace[d], self._pass_mark, d)
        else:
            self._compute(unit.rest * self._pace[d], self._computed, d)
        self._give(d, unit.stage, unit.marks[at].pieces)

    def _computed(self, d: int) -> None:
        now, unit = self._engine.now, self._unit[d]
        assert unit is not None
        if now > self.end:
            self.end = now
        self.ends[d].append(now)
        self._unit[d] = None
        if unit.role not in (Role.AGREEMENT, Role.GATHER):
            self._worked[self._core[d]] = now
            self._working[self._core[d]] -= 1
        if unit.role is Role.UPDATE:
            self._updates[d, unit.stage] += 1
        self._advance(d)
        if unit.final:
            # After the messages of this backward, which other stages wait for.
            self._give(d, unit.stage, unit.final)

    def _give(self, d: int, stage: int, pieces: tuple[int, ...]) -> None:
        """A device's gradients of these pieces are final."""
        number = self._updates[d, stage]
        for piece in pieces:
            self._given[number, piece] += 1
            if self._given[number, piece] == self.program.sums[piece].waits_for:
                self._sum_next(self.program.sums[piece].queue)

    def _sum_next(self, queue: int) -> None:
        """Start the next all-reduce of a queue, if it can."""
        pieces = self._queues[queue]
        number, turn = divmod(self._turns[queue], len(pieces))
        work = self.program.sums[pieces[turn]]
        if self._is_summing[queue] or self._given[number, pieces[turn]] < work.waits_for:
            return
        self._is_summing[queue] = True
        self._turns[queue] += 1
        engine, free_at = self._engine, self._free_at
        start = max(engine.now, max((free_at[port] for port in work.ports), default=0.0))
        for port in work.ports:
            free_at[port] = start + work.seconds
        self.summed.append((pieces[turn], start))
        engine.at(start + work.seconds, self._summed, (number, pieces[turn]))

    def _summed(self, which: tuple[int, int]) -> None:
        """An all-reduce has ended: the next one, and updates that have waited for it."""
        number, piece = which
        self.end = max(self.end, self._engine.now)
        work = self.program.sums[piece]
        self._is_summing[work.queue] = False
        self._sum_next(work.queue)
        for stage in work.stages:
            self._sums_of[number, stage] += 1
            if self._sums_of[number, stage] == self._parts[stage]:
                for d in self._updating.pop((number, stage), ()):
                    unit = self._unit[d]
                    assert unit is not None
                    if unit.role is Role.UPDATE:
                        self._start(d)
                    else:
                        self._agree(d)

    def _await_sums(self, d: int, stage: int) -> None:
        """Update a stage as soon as all of its gradients are summed."""
        number = self._updates[d, stage]
        if self._sums_of[number, stage] == self._parts[stage]:
            self._start(d)
        else:
            self._updating[number, stage].append(d)

    def _agree(self, d: int) -> None:
        """A device is through its list; the last one to have its sums lets all go on."""
        for stage in self._stages[d]:
            if self._sums_of[0, stage] != self._parts[stage]:
                self._updating[0, stage].append(d)
                return
        self._agreed += 1
        if self._agreed == len(self._code):
            for other in range(len(self._code)):
                self.starts[other].append(self._engine.now)
                self._engine.after(self._agreement_s, self._computed, other)

    @cached_property
    def _stages(self) -> list[set[int]]:
        """Per device, the stages whose gradients it has."""
        return [
            {unit.stage for unit in self._units_of(d) if unit.stage >= 0}
            for d in range(len(self._code))
        ]

    def _reached(self) -> list[list[int]]:
        """Per device, the part of its code that is done."""
        waiting = {d for d in self._waiter if d >= 0}
        return [
            code[: len(code) - length_hint(rest) - (d in waiting or self._unit[d] is not None)]
            for d, (code, rest) in enumerate(zip(self.program.code, self._code, strict=True))
        ]

    @property
    def is_done(self) -> bool:
        """Whether all devices are through their lists."""
        return all(map(eq, map(len, self._reached()), map(len, self.program.code)))

    def positions(self) -> list[int]:
        """Per device, how many of its actions are done."""
        return [sum(map(self._is_action, code)) for code in self._reached()]

    def spans(self, schedule: Schedule) -> list[Span]:
        """Everything that happened but for all-reduces; messages are spans at both ends."""
        computed, exchanged = [], []
        for d, device in enumerate(self.program.devices):
            clock = zip(self._units_of(d), self.starts[d], self.ends[d], strict=True)
            times = ((start, end) for unit, start, end in clock if unit.role is Role.ACTION)
            code = filter(self._is_action, self.program.code[d])
            for x, action in zip(code, schedule.actions[device], strict=True):
                message = x if x >= 0 else ~x
                if message >= len(self._price):
                    computed.append(Span(device, *next(times), action))
                    continue
                start = self._freed[message] - self._price[message].occupies_s
                exchanged.append(Span(device, start, self._arrival[message], action))
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
            clock = zip(self._units_of(d), self.starts[d], self.ends[d], strict=True)
            for unit, start, end in clock:
                if unit.role is not Role.ACTION and end > start:
                    yield OverheadSpan(device, start, end, _WHAT[unit.role])

    def logs(self) -> list[tuple[NDArray[np.float64], NDArray[np.bool_]]]:
        """Per device in the order of its list, when what it receives arrived and what it computes
        ended, and which of these are computes.
        """
        arrival, first = np.array(self._arrival), len(self._price)
        logged = np.array([unit.role in (Role.ACTION, Role.UPDATE) for unit in self._units])
        result = []
        for listed, ends in zip(self.program.code, self.ends, strict=True):
            code = np.array(listed)
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
            if any(unit.role is Role.UPDATE for unit in self._units_of(d))
        }

    def memory(self, d: int) -> list[tuple[float, float]]:
        """When a device took or released how many bytes."""
        changes = []
        for unit, start, end in zip(self._units_of(d), self.starts[d], self.ends[d], strict=True):
            if unit.before:
                changes.append((start, unit.before))
            if unit.after:
                changes.append((end, -unit.after))
        return changes

    @cached_property
    def units(self) -> list[list[ComputeUnit]]:
        """Per device, what ``starts`` and ``ends`` are of."""
        return [self._units_of(d) for d in range(len(self._code))]

    @property
    def moved(self) -> list[tuple[float, float]]:
        """Per message, when it began to occupy its ports, and when it had arrived."""
        return [
            (freed - price.occupies_s, arrival)
            for price, freed, arrival in zip(self._price, self._freed, self._arrival, strict=True)
        ]

    def _units_of(self, d: int) -> list[ComputeUnit]:
        first = len(self._price)
        return [self._units[~x - first] for x in self.program.code[d] if ~x >= first]

    def _is_action(self, x: int) -> bool:
        unit = ~x - len(self._price)
        return unit < 0 or self._units[unit].role is Role.ACTION


def _cores_of(devices: Sequence[int], costs: StepCosts) -> tuple[list[int], int]:
    """Per device whose core it has: its own, or the first one's of its host where those have to
    share; and how many may work there at a time.
    """
    hosts = [costs.host(device) for device in devices]
    if not costs.cores or max(Counter(hosts).values()) <= costs.cores:
        return list(range(len(devices))), 1
    return [hosts.index(host) for host in hosts], costs.cores
