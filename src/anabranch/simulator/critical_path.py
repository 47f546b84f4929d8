"""The critical path of a simulated step: what led to an event, followed back second by second.

Everything in a step begins when the last thing that it waits for has happened, so from any event
there is a way back to time 0 on which each second has one cause::

    device 0   F0 F1 .  .  .  B0 ...        B0 on device 0 began at 5:
    device 1   .  F0 F1 B0 ..               4-5  message from stage 1 to stage 0
               0  1  2  3  4  5             3-4  B0 on device 1
                                            2-3  F1 on device 1, and so on

A message that was ready but had to wait for a port is a cause of its own, and so is an all-reduce.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import count
from typing import NamedTuple

from anabranch.simulator.events import Role
from anabranch.simulator.step import Step
from anabranch.simulator.units import ComputeUnit


class Cause(StrEnum):
    """What a part of a step is spent on."""

    COMPUTE = "compute"
    MESSAGE = "message"
    MESSAGE_PORTS = "message_ports"
    ALL_REDUCE = "all_reduce"
    ALL_REDUCE_PORTS = "all_reduce_ports"
    AGREEMENT = "agreement"
    UPDATE = "update"
    GATHER = "gather"
    OVERHEAD = "overhead"


class Segment(NamedTuple):
    """A part of a step with its cause.

    Attributes:
        stages: that compute, update or sum; of a message, from which to which; none of what
            concerns a device or all of them.
        device: that is busy; -1 for what several take part in.
    """

    start: float
    end: float
    cause: Cause
    stages: tuple[int, ...]
    device: int = -1


class _Event(NamedTuple):
    """Unit ``number`` of device ``place``, message ``number``, or all-reduce ``number``."""

    cause: Cause
    number: int
    place: int = -1


_Moment = tuple[float, _Event | None]
"""When something was possible, and what made it so; nothing did at the start."""

_BY_ROLE = {
    Role.ACTION: Cause.COMPUTE,
    Role.OVERHEAD: Cause.OVERHEAD,
    Role.AGREEMENT: Cause.AGREEMENT,
    Role.UPDATE: Cause.UPDATE,
    Role.GATHER: Cause.GATHER,
}

_WAITING = {
    Cause.MESSAGE: Cause.MESSAGE_PORTS,
    Cause.ALL_REDUCE: Cause.ALL_REDUCE_PORTS,
    Cause.GATHER: Cause.GATHER,
}
"""What it is when an event begins later than what it waited for ended."""


@dataclass(frozen=True, slots=True)
class Ran:
    """A unit of a device as it ran; if it shared its processor, for longer than it takes alone."""

    start: float
    end: float
    unit: ComputeUnit

    @property
    def cause(self) -> Cause:
        """What its time is spent on."""
        return _BY_ROLE[self.unit.role]

    @property
    def stages(self) -> tuple[int, ...]:
        """Its stage, if it has one."""
        return (self.unit.stage,) if self.unit.stage >= 0 else ()


class History:
    """What led to what in a step that has run to its end.

    Args:
        step: with a single update of every stage.
    """

    def __init__(self, step: Step) -> None:
        self._step, self._program = step, step.program
        program = step.program
        self._messages = program.size
        self.ran: tuple[tuple[Ran, ...], ...] = tuple(
            tuple(map(Ran, starts, ends, units))
            for units, starts, ends in zip(step.units, step.starts, step.ends, strict=True)
        )
        # Where the units and the ends of messages are in the lists of the devices.
        self._at: list[list[int]] = []
        self._sent: dict[int, tuple[int, int]] = {}
        self._received: dict[int, tuple[int, int]] = {}
        for d, code in enumerate(program.code):
            self._at.append([p for p, x in enumerate(code) if ~x >= self._messages])
            self._sent.update({~x: (d, p) for p, x in enumerate(code) if 0 <= ~x < self._messages})
            self._received.update({x: (d, p) for p, x in enumerate(code) if x >= 0})
        self._opener: list[int] = program.messages.opener.tolist()
        self._moved = step.moved
        self._index_sums()

    def _index_sums(self) -> None:
        program = self._program
        # Per piece, when each of its gradients was final; per all-reduce, the one before it.
        self._final: dict[int, list[_Moment]] = defaultdict(list)
        for d, units in enumerate(self._step.units):
            for k, (unit, ran) in enumerate(zip(units, self.ran[d], strict=True)):
                event = _Event(Cause.COMPUTE, k, d)
                slower = (ran.end - ran.start) / unit.seconds if unit.seconds else 0.0
                at = ran.start
                for mark in unit.marks:
                    at = min(at + mark.seconds * slower, ran.end)
                    for piece in mark.pieces:
                        self._final[piece].append((at, event))
                for piece in unit.final:
                    self._final[piece].append((ran.end, event))
        self._before: dict[int, int] = {}
        self._sums_of: dict[int, list[int]] = defaultdict(list)
        last: dict[int, int] = {}
        for i, (piece, _) in enumerate(self._step.summed):
            work = program.sums[piece]
            if work.queue in last:
                self._before[i] = last[work.queue]
            last[work.queue] = i
            for stage in work.stages:
                self._sums_of[stage].append(i)

    def path(self) -> Iterator[Segment]:
        """The critical path of the whole step, the latest part first."""
        return self.back_from_end(0.0)

    def back_from_end(self, until: float) -> Iterator[Segment]:
        """What led to the end of the step, back to a time."""
        ends: list[_Moment] = [(0.0, None)]
        for d, units in enumerate(self.ran):
            k = len(units) - 1
            ends += [(ran.end, _Event(ran.cause, k, d)) for ran in units[-1:]]
        ends += [(self._sum(i)[1], _Event(Cause.ALL_REDUCE, i)) for i in self._sums()]
        return self._back(max(ends, key=lambda moment: moment[0]), until)

    def back_from(self, device: int, number: int, until: float) -> Iterator[Segment]:
        """What kept a device, by its place, from starting a unit, back to a time."""
        event = _Event(self.ran[device][number].cause, number, device)
        return self._back(self._cause_of(event), until)

    def _back(self, moment: _Moment, until: float) -> Iterator[Segment]:
        end, event = moment
        while event is not None and end > until:
            begin, stages, device = self._begin(event)
            possible, before = self._cause_of(event)
            # Where ranks share processors, gradients may have been final a little earlier or later.
            possible = min(possible, end)
            begin = max(begin, possible)
            if end > begin:
                yield Segment(max(begin, until), end, event.cause, stages, device)
            if begin > max(possible, until):
                waiting = _WAITING.get(event.cause, Cause.OVERHEAD)
                yield Segment(max(possible, until), begin, waiting, stages, device)
            end, event = possible, before
        if end > until:
            yield Segment(until, end, Cause.OVERHEAD, ())

    def _begin(self, event: _Event) -> tuple[float, tuple[int, ...], int]:
        """When an event began, its stages and its device."""
        if event.cause is Cause.MESSAGE:
            # A stage sends what it has just made, and uses what it has just received.
            sender = self._nearest_stage(*self._sent[event.number], -1)
            receiver = self._nearest_stage(*self._received[event.number], 1)
            return self._moved[event.number][0], (sender, receiver), -1
        if event.cause is Cause.ALL_REDUCE:
            piece, start = self._step.summed[event.number]
            return start, self._program.sums[piece].stages, -1
        ran = self.ran[event.place][event.number]
        return ran.start, ran.stages, self._program.devices[event.place]

    def _nearest_stage(self, d: int, position: int, direction: int) -> int:
        """The stage that a device computes nearest to a position in its list."""
        k = bisect_left(self._at[d], position) - (direction < 0)
        while self.ran[d][k].unit.role is not Role.ACTION:
            k += direction
        return self.ran[d][k].unit.stage

    def _cause_of(self, event: _Event) -> _Moment:
        """The last of what an event waited for."""
        if event.cause is Cause.MESSAGE:
            moments = [self._passed(*self._sent[event.number])]
            if (opener := self._opener[event.number]) >= 0:
                device, at = self._received[opener]
                moments.append(self._passed(device, at + 1))
        elif event.cause is Cause.ALL_REDUCE:
            piece, _ = self._step.summed[event.number]
            moments = list(self._final[piece])
            if (before := self._before.get(event.number)) is not None:
                moments.append((self._sum(before)[1], _Event(Cause.ALL_REDUCE, before)))
        else:
            moments = self._before_compute(event)
        return max(moments, key=lambda moment: moment[0], default=(0.0, None))

    def _before_compute(self, event: _Event) -> list[_Moment]:
        d, k = event.place, event.number
        ran, unit = self.ran[d][k], self.ran[d][k].unit
        moments = [self._passed(d, self._at[d][k])]
        if unit.group >= 0:
            for other in self._program.groups[unit.group]:
                starts = self._step.starts[other]
                alike = (
                    i
                    for i in count(bisect_left(starts, ran.start))
                    if self._step.units[other][i].group == unit.group
                )
                moments.append(self._passed(other, self._at[other][next(alike)]))
        if unit.role is Role.AGREEMENT:
            for other, units in enumerate(self.ran):
                k = next(i for i, ran in enumerate(units) if ran.cause is Cause.AGREEMENT)
                moments.append(self._passed(other, self._at[other][k]))
        if unit.role in (Role.AGREEMENT, Role.UPDATE):
            waited = self._sums() if unit.stage < 0 else self._sums_of[unit.stage]
            moments += [(self._sum(i)[1], _Event(Cause.ALL_REDUCE, i)) for i in waited]
        return moments

    def _passed(self, d: int, position: int) -> _Moment:
        """When a device had come to a position in its list, and what it last waited for there."""
        code = self._program.code[d]
        moment: _Moment = 0.0, None
        for p in range(position - 1, -1, -1):
            x = code[p]
            if x >= 0:
                arrived = self._moved[x][1]
                if arrived > moment[0]:
                    moment = arrived, _Event(Cause.MESSAGE, x)
            elif ~x >= self._messages:
                k = bisect_left(self._at[d], p)
                if self.ran[d][k].end >= moment[0]:
                    moment = self.ran[d][k].end, _Event(self.ran[d][k].cause, k, d)
                break
        return moment

    def _sums(self) -> range:
        return range(len(self._step.summed))

    def _sum(self, i: int) -> tuple[float, float]:
        piece, start = self._step.summed[i]
        return start, start + self._program.sums[piece].seconds
