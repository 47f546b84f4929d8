"""The event loop of one simulated step, on integers; ``simulator.run`` says what they stand for.

It spends its time on messages, so it works on lists of plain numbers (``simulator.program``), and a
message is an event only for a device that waits for it: its arrival is known as soon as it starts
to move.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from operator import length_hint

import numpy as np
from numpy.typing import NDArray

from anabranch.cost.communication import Port
from anabranch.schedule.schedule import Schedule
from anabranch.simulator.costs import AllReduce, StepCosts
from anabranch.simulator.engine import Callback, Engine, SharedCores
from anabranch.simulator.program import ComputeUnit, Program
from anabranch.timeline import Span

PIECE_BYTES = 25 * 2**20
"""An all-reduce goes in buckets of this size, PyTorch's default."""

MOST_PIECES = 16


@dataclass(slots=True)
class _Pending:
    """An all-reduce, and how many (stage, device) pairs have still to finish before it."""

    unit: ComputeUnit
    waits_for: int


class Step:
    """The state of one simulated step; ``starts`` and ``ends`` are of computes, per device."""

    def __init__(self, program: Program, costs: StepCosts, *, sums_at_end: bool = True) -> None:
        devices, messages = len(program.devices), len(program.messages.price)
        self.program = program
        self.end = 0.0
        self.starts: list[list[float]] = [[] for _ in range(devices)]
        self.ends: list[list[float]] = [[] for _ in range(devices)]
        self._engine = Engine()
        self._compute = self._clock(costs.cores)
        self._code = [iter(code) for code in program.code]
        self._price, self._releases = program.messages.price, program.messages.releases
        self._units = program.units
        self._unit: list[ComputeUnit | None] = [None] * devices
        self._missing = [len(group) for group in program.groups]
        # A message moves as soon as it is both sent and posted: at the second of the two.
        self._is_ready = list(program.messages.is_posted)
        self._freed = [0.0] * messages
        self._arrival = [math.inf] * messages
        self._place = [0] * messages
        self._waiter = [-1] * messages
        self._all_reduces = self._plan_all_reduces(costs) if sums_at_end else {}
        self._free_at = [0.0] * len(program.ports)

    def _clock(self, cores: int) -> Callable[[float, Callback, int], None]:
        if 0 < cores < len(self.program.devices):
            return SharedCores(self._engine, cores).after
        return self._engine.after

    def _plan_all_reduces(self, costs: StepCosts) -> dict[int, list[_Pending]]:
        """Per stage, the all-reduces that wait for it."""
        by_stage: dict[int, list[_Pending]] = defaultdict(list)
        for work in costs.all_reduces():
            waits_for = sum(self.program.finishes[s] for s in work.stages)
            pending = _Pending(sum_unit(work, self.program.ports), waits_for)
            for s in work.stages:
                by_stage[s].append(pending)
        return by_stage

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
                if unit.group < 0:
                    self.starts[d].append(now)
                    self._compute(unit.seconds, self._computed, d)
                else:
                    self._come(unit)
                return

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
        seconds, latency_s, ports = self._price[message]
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

    def _occupy(self, ports: tuple[int, ...], seconds: float) -> float:
        """Take all ports as soon as the last of them is free; when they are free again."""
        free_at = self._free_at
        end = self._engine.now
        for port in ports:
            if free_at[port] > end:
                end = free_at[port]
        end += seconds
        for port in ports:
            free_at[port] = end
        return end

    def _come(self, unit: ComputeUnit) -> None:
        """The last device of a replica to come to a unit starts it on all of them."""
        self._missing[unit.group] -= 1
        if self._missing[unit.group] == 0:
            members = self.program.groups[unit.group]
            self._missing[unit.group] = len(members)
            for d in members:
                self.starts[d].append(self._engine.now)
                if not unit.pieces:
                    self._compute(unit.seconds, self._computed, d)
            if unit.pieces:
                self._sum((unit, unit.pieces))

    def _sum(self, state: tuple[ComputeUnit, int]) -> None:
        """Start the next piece of an all-reduce; a group that waits goes on after the last."""
        unit, left = state
        self.end = max(self.end, self._engine.now)
        if left:
            end = self._occupy(unit.ports, unit.seconds / unit.pieces)
            self._engine.at(end, self._sum, (unit, left - 1))
        elif unit.group >= 0:
            for d in self.program.groups[unit.group]:
                self._computed(d)

    def _computed(self, d: int) -> None:
        now, unit = self._engine.now, self._unit[d]
        assert unit is not None
        if now > self.end:
            self.end = now
        self.ends[d].append(now)
        self._unit[d] = None
        self._advance(d)
        if unit.last >= 0:
            # After the messages of this backward, which other stages wait for.
            self._finish_stage(unit.last)

    def _finish_stage(self, stage: int) -> None:
        for pending in self._all_reduces.get(stage, ()):
            pending.waits_for -= 1
            if pending.waits_for == 0:
                self._sum((pending.unit, pending.unit.pieces))

    def positions(self) -> list[int]:
        """Per device, how many of its actions are done."""
        waiting = {d for d in self._waiter if d >= 0}
        return [
            len(code) - length_hint(rest) - (d in waiting or self._unit[d] is not None)
            for d, (code, rest) in enumerate(zip(self.program.code, self._code, strict=True))
        ]

    def spans(self, schedule: Schedule) -> list[Span]:
        """Everything that happened but for all-reduces; messages are spans at both ends."""
        computed, exchanged = [], []
        for d, device in enumerate(self.program.devices):
            clock = zip(self._units_of(d), self.starts[d], self.ends[d], strict=True)
            times = ((start, end) for unit, start, end in clock if not unit.pieces)
            code = [x for x in self.program.code[d] if not self._is_sum(x)]
            for x, action in zip(code, schedule.actions[device], strict=True):
                message = x if x >= 0 else ~x
                if message >= len(self._price):
                    computed.append(Span(device, *next(times), action))
                    continue
                start = self._freed[message] - self._price[message].occupies_s
                exchanged.append(Span(device, start, self._arrival[message], action))
        return computed + exchanged

    def logs(self) -> list[tuple[NDArray[np.float64], NDArray[np.bool_]]]:
        """Per device in the order of its list, when what it receives arrived and what it computes
        ended, and which of these are computes.
        """
        arrival, first = np.array(self._arrival), len(self._price)
        result = []
        for listed, ends in zip(self.program.code, self.ends, strict=True):
            code = np.array(listed)
            code = code[(code >= 0) | (code <= ~first)]  # without sends
            computes = code < 0
            times = np.empty(len(code))
            times[computes] = ends
            times[~computes] = arrival[code[~computes]]
            result.append((times, computes))
        return result

    def memory(self, d: int) -> list[tuple[float, float]]:
        """When a device took or released how many bytes."""
        changes = []
        for unit, start, end in zip(self._units_of(d), self.starts[d], self.ends[d], strict=True):
            if unit.before:
                changes.append((start, unit.before))
            if unit.after:
                changes.append((end, -unit.after))
        return changes

    def _units_of(self, d: int) -> list[ComputeUnit]:
        first = len(self._price)
        return [self._units[~x - first] for x in self.program.code[d] if ~x >= first]

    def _is_sum(self, x: int) -> bool:
        unit = ~x - len(self._price)
        return unit >= 0 and self._units[unit].pieces > 0


def sum_unit(work: AllReduce, ports: dict[Port, int], group: int = -1) -> ComputeUnit:
    """An all-reduce as a unit, for which a group may wait; ``ports`` get those that are new."""
    indices = tuple(ports.setdefault(port, len(ports)) for port in work.ports)
    return ComputeUnit(work.seconds, 0.0, 0.0, -1, group, num_pieces(work), indices)


def num_pieces(work: AllReduce) -> int:
    """Pieces that an all-reduce goes in."""
    return min(max(-(-work.nbytes // PIECE_BYTES), 1), MOST_PIECES)
