"""One simulated step: what has happened when the clock has run."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from anabranch.schedule.schedule import Schedule
from anabranch.simulator.costs import StepCosts
from anabranch.simulator.events import Role, play
from anabranch.simulator.program import ComputeUnit, Program
from anabranch.simulator.tables import tables_of
from anabranch.timeline import OverheadSpan, Span, SumSpan

_WHAT = {
    Role.OVERHEAD: "bookkeeping",
    Role.AGREEMENT: "agreement",
    Role.UPDATE: "update",
    Role.GATHER: "gather",
}


class Step:
    """One simulated step; several in a row are one as well."""

    def __init__(self, program: Program, costs: StepCosts) -> None:
        self.program = program
        self._tables = tables_of(program, costs)

    def run(self) -> None:
        """Start every device and go on until nothing happens."""
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
        """Per device, its units with their starts and ends."""
        size, units = self.program.size, self.program.units
        times = iter(zip(*(self._tables.runs[x].tolist() for x in ("start", "end")), strict=True))
        return [
            [(units[~x - size], *next(times)) for x in code if ~x >= size]
            for code in self.program.code
        ]

    @cached_property
    def summed(self) -> list[tuple[int, float]]:
        """Per all-reduce of a piece, its index and when it began."""
        pieces = self._tables.pieces
        places = np.argsort(pieces["begun"])[len(pieces) - self._tables.clock[0].summed :]
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
        """Return True if all devices have finished their lists."""
        return bool((self._tables.devices["at"] == self._tables.devices["stop"]).all())

    def positions(self) -> list[int]:
        """Per device, how many of its actions are done."""
        return [sum(map(self._is_action, code)) for code in self._reached()]

    def spans(self, schedule: Schedule) -> list[Span]:
        """The actions of a schedule as they happened; messages are spans at both ends."""
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
        """The all-reduces, on every device that takes part."""
        for piece, start in self.summed:
            work = self.program.sums[piece]
            for device in work.devices:
                yield SumSpan(device, start, start + work.seconds, work.stages, work.nbytes)

    def overhead_spans(self) -> Iterator[OverheadSpan]:
        """Generate the time of devices besides actions."""
        for d, device in enumerate(self.program.devices):
            for unit, start, end in self.runs[d]:
                if unit.role is not Role.ACTION and end > start:
                    yield OverheadSpan(device, start, end, _WHAT[unit.role])

    @cached_property
    def last_ends(self) -> NDArray[np.float64]:
        """End of the last action of each device that computes."""
        program, size = self.program, self.program.size
        is_action = np.array([unit.role is Role.ACTION for unit in program.units])
        computes = program.entries < -size
        device = np.repeat(np.arange(len(program.devices)), np.diff(program.first))[computes]
        chosen = is_action[~program.entries[computes] - size]
        first = np.flatnonzero(np.diff(device[chosen], prepend=-1))
        ends: NDArray[np.float64] = np.maximum.reduceat(self._tables.runs["end"][chosen], first)
        return ends

    def memory(self, d: int) -> list[tuple[float, float]]:
        """Return (time, bytes) of memory taken or released by a device."""
        changes = []
        for unit, start, end in self.runs[d]:
            if unit.before:
                changes.append((start, unit.before))
            if unit.after:
                changes.append((end, -unit.after))
        return changes

    @property
    def moved(self) -> list[tuple[float, float]]:
        """Per message, when it began to occupy its ports, and when it had arrived."""
        messages = self._tables.messages
        begun = messages["freed"] - messages["occupies"]
        return list(zip(begun.tolist(), messages["arrival"].tolist(), strict=True))

    def _is_action(self, x: int) -> bool:
        unit = ~x - len(self._tables.messages)
        return unit < 0 or self.program.units[unit].role is Role.ACTION
