"""Position of a rank in its step, in a few integers that another process can read.

Local ranks share them with their parent, ranks of torchrun with each other: a rank that is killed,
or hangs, cannot say where it was::

    step  stage  micro-batch  doing    phase  waits  mini-batch  settled  time
       7      1            3  forward  step       0           0        1  81 s
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum

from anabranch.schedule.schedule import Action, Kind

POSITION_INTS = 9
"""Integers of one rank's position, as in the module's picture; -1 for none. ``waits`` is 1 while
the rank waits for another one, ``mini-batch`` is 1 if a step is a mini-batch, without a flush.
"""

_STEP, _STAGE, _MICROBATCH, _DOING, _PHASE = range(5)
_WAITS, _MINIBATCH, _SETTLED, _TIME = range(5, POSITION_INTS)

_ACTIONS = {
    Kind.FORWARD: "in the forward",
    Kind.BACKWARD: "in the backward",
    Kind.INPUT_GRADIENT: "in the backward",
    Kind.WEIGHT_GRADIENT: "in the backward",
    Kind.SEND_FORWARD: "sending activations",
    Kind.RECEIVE_FORWARD: "waiting for activations",
    Kind.SEND_BACKWARD: "sending gradients",
    Kind.RECEIVE_BACKWARD: "waiting for gradients",
}
_KINDS = tuple(_ACTIONS)
_NUMBERS = {kind: number for number, kind in enumerate(_KINDS)}
_RECEIVES = {_NUMBERS[kind] for kind in _KINDS if kind.is_receive}


class Phase(IntEnum):
    """Work of a rank besides the actions of its schedule."""

    OUTSIDE = 0
    START_UP = 1
    DATA = 2
    STEP = 3
    UPDATE = 4
    SAVE = 5
    EVALUATION = 6
    MOVE = 7
    TOTALS = 8
    HELD_OUT = 9


_PHASES = {
    Phase.START_UP: "in start-up",
    Phase.DATA: "reading data",
    Phase.UPDATE: "in the update",
    Phase.SAVE: "saving a checkpoint",
    Phase.EVALUATION: "in the evaluation",
    Phase.MOVE: "changing to another plan",
    Phase.TOTALS: "adding up gradients and losses",
    Phase.HELD_OUT: "reading held-out data",
}
"""Phase -> text; other phases have none."""


class Position:
    """Position of this process."""

    def __init__(self) -> None:
        self._ints = memoryview(bytearray(8 * POSITION_INTS)).cast("q")
        self.leave()

    def share(self, ints: memoryview) -> None:
        """Keep the position in memory that another process reads."""
        self._ints = ints
        self.leave()

    def enter(self, step: int, action: Action) -> None:
        """Note the action that begins."""
        ints = self._ints
        ints[0], ints[1], ints[2] = step, action.stage, action.microbatch
        ints[3] = _NUMBERS[action.kind]
        ints[_TIME] = time.monotonic_ns()

    def begin(self, step: int, phase: Phase = Phase.STEP, *, is_minibatch: bool = False) -> None:
        """Note that a step, or without a flush a mini-batch, begins or goes on in some phase."""
        ints = self._ints
        ints[0], ints[1], ints[2], ints[3], ints[_PHASE] = step, -1, -1, -1, phase
        ints[_WAITS], ints[_MINIBATCH] = 0, int(is_minibatch)
        ints[_TIME] = time.monotonic_ns()

    def leave(self) -> None:
        """Note that no step is under way."""
        self.begin(-1, Phase.OUTSIDE)

    def settle(self) -> None:
        """Note that the first step has been made: nothing is compiled or set up any more."""
        self._ints[_SETTLED] = 1

    @contextmanager
    def doing(self, phase: Phase) -> Iterator[None]:
        """Note a phase inside the block; stays noted after an error."""
        before = self._ints.tolist()
        self.begin(before[_STEP], phase, is_minibatch=bool(before[_MINIBATCH]))
        yield
        for index in range(_SETTLED):
            self._ints[index] = before[index]
        self._ints[_TIME] = time.monotonic_ns()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Note that this rank waits for others inside the block; stays noted after an error."""
        ints = self._ints
        if ints[_WAITS]:
            yield
            return
        ints[_WAITS], ints[_TIME] = 1, time.monotonic_ns()
        yield
        ints[_WAITS], ints[_TIME] = 0, time.monotonic_ns()

    @property
    def stage(self) -> int:
        """Stage of the action under way; -1 for none."""
        return self._ints[_STAGE]

    @property
    def numbers(self) -> list[int]:
        return list(self._ints.tolist())

    def __str__(self) -> str:
        return describe_position(self._ints.tolist())


def describe_position(ints: Sequence[int]) -> str:
    """Describe a position by its integers; further integers may follow them."""
    step, stage, microbatch, kind = ints[:_PHASE]
    phase, is_waiting = phase_of(ints), bool(ints[_WAITS])
    parts = [_PHASES.get(phase, "")]
    if stage >= 0:
        parts = [f"{_ACTIONS[_KINDS[kind]]} of stage {stage}", f"micro-batch {microbatch}"]
        parts += [_PHASES[phase]] if phase is Phase.EVALUATION else []
    if is_waiting and phase is Phase.TOTALS:
        parts = ["waiting for the sums of all ranks"]
    elif is_waiting and kind not in _RECEIVES:
        parts.append("waiting for other ranks")
    if step >= 0:
        when = f"{'mini-batch' if ints[_MINIBATCH] else 'step'} {step}"
        parts.append(when if any(parts) else f"in {when}")
    return ", ".join(filter(None, parts)) or "outside of the steps"


def phase_of(ints: Sequence[int]) -> Phase:
    return Phase(ints[_PHASE])


def is_settled(ints: Sequence[int]) -> bool:
    """Return True if the rank has made its first step."""
    return bool(ints[_SETTLED])


def waits(ints: Sequence[int]) -> bool:
    return bool(ints[_WAITS]) or ints[_DOING] in _RECEIVES


POSITION = Position()
"""The position of this process, which is one rank."""
