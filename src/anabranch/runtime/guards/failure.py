"""The first failure of a run, told to the user once, with the place where it happened.

One rank fails, then the connections of its neighbours break, then theirs. Only one of the
exceptions is the cause; consequences have a type of their own::

    rank 1   ValueError in the forward of stage 1         the cause: StageFailedError
    rank 0   connection closed by peer                    a consequence: PeerLostError
    rank 2   connection closed by peer                    a consequence: PeerLostError

A rank notes where it is in a few integers, which local ranks share with their parent: a rank that
is killed cannot say where it was.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from anabranch import errors
from anabranch.errors import AnabranchError, StageFailedError, TrainingError
from anabranch.plans.stages import StageGraph
from anabranch.schedule.schedule import Action, Kind

POSITION_INTS = 4
"""Integers of one rank's position: step, stage, micro-batch, what it does there; -1 for none."""

_DOING = {
    Kind.FORWARD: "in the forward",
    Kind.BACKWARD: "in the backward",
    Kind.INPUT_GRADIENT: "in the backward",
    Kind.WEIGHT_GRADIENT: "in the backward",
    Kind.SEND_FORWARD: "sending activations",
    Kind.RECEIVE_FORWARD: "waiting for activations",
    Kind.SEND_BACKWARD: "sending gradients",
    Kind.RECEIVE_BACKWARD: "waiting for gradients",
}
_KINDS = tuple(_DOING)
_NUMBERS = {kind: number for number, kind in enumerate(_KINDS)}

_MINIBATCH = 100
"""Added to what a rank does where steps are mini-batches without a flush."""

_BROKEN = ("gloo/transport", "Connection closed by peer", "Connection reset by peer")
"""What torch.distributed says when another process is gone."""


class PeerLostError(TrainingError):
    """The connection to another rank broke: a consequence of a failure elsewhere, not a cause."""


class Position:
    """Where this process is in its schedule: step, stage, micro-batch, action."""

    def __init__(self) -> None:
        self._unit = 0
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
        ints[3] = _NUMBERS[action.kind] + self._unit

    def begin(self, step: int, *, is_minibatch: bool = False) -> None:
        """Note that a step begins or goes on; without a flush it is called a mini-batch."""
        self._unit = _MINIBATCH if is_minibatch else 0
        ints = self._ints
        ints[0], ints[1], ints[2], ints[3] = step, -1, -1, self._unit

    def leave(self) -> None:
        """Note that no step is under way."""
        self.begin(-1)

    @property
    def stage(self) -> int:
        """Of the action under way; -1 for none."""
        return self._ints[1]

    def __str__(self) -> str:
        return describe_position(self._ints)


def describe_position(ints: memoryview) -> str:
    """Text for the integers of a position, empty outside of a step."""
    step, stage, microbatch, kind = ints[:POSITION_INTS]
    if step < 0:
        return ""
    is_minibatch, number = divmod(kind, _MINIBATCH)
    when = f"{'mini-batch' if is_minibatch else 'step'} {step}"
    if stage < 0:
        return f"in {when}"
    return f"{_DOING[_KINDS[number]]} of stage {stage}, micro-batch {microbatch}, {when}"


POSITION = Position()
"""Of this process. A rank is a process, so there is one."""


@contextmanager
def located(rank: int, graph: StageGraph | None = None) -> Iterator[None]:
    """Turn what is raised inside into a StageFailedError that says where; our own errors pass."""
    try:
        yield
    except PeerLostError as error:
        where = str(POSITION)
        raise PeerLostError(f"rank {rank}{', ' + where if where else ''}: {error}") from error
    except AnabranchError:
        raise
    except Exception as error:
        where = str(POSITION)
        raise StageFailedError(
            f"rank {rank} failed{' ' + where if where else ''}: {one_line(error)}{_among(graph)}"
        ) from error


def _among(graph: StageGraph | None) -> str:
    """The operators of the stage that this process is in, as text."""
    stage = POSITION.stage
    if graph is None or not 0 <= stage < len(graph):
        return ""
    operators = graph.stages[stage].operators
    named = ", ".join(operators) if len(operators) < 5 else f"{operators[0]} .. {operators[-1]}"
    return f"; stage {stage} computes {named}"


def _is_consequence(error: BaseException) -> bool:
    """Whether a connection broke, in our messages or in a collective that the user called."""
    text = str(error)
    return isinstance(error, PeerLostError) or (
        isinstance(error, RuntimeError) and any(sign in text for sign in _BROKEN)
    )


def one_line(error: BaseException) -> str:
    """Type and message on one line, not longer than a paragraph."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:600]}{' ...' if len(text) > 600 else ''}".rstrip(": ")


@dataclass(frozen=True, slots=True)
class Failure:
    """What one rank tells of its end, as plain text; ``kind`` is the exception's class name."""

    rank: int
    kind: str
    message: str
    trace: str
    is_consequence: bool

    @staticmethod
    def of(error: BaseException, rank: int) -> Failure:
        """Describe the exception that ended a rank."""
        if isinstance(error, AnabranchError):
            message = str(error)
        else:
            message = f"rank {rank} failed outside of the steps: {one_line(error)}"
        return Failure(
            rank,
            type(error).__name__,
            message,
            "".join(traceback.format_exception(error)),
            _is_consequence(error),
        )

    def exception(self) -> AnabranchError:
        """The exception for the caller: of the same class where it is one of ours."""
        kind = getattr(errors, self.kind, StageFailedError)
        error: AnabranchError = kind(self.message)
        if self.trace:
            error.add_note(f"Traceback of rank {self.rank}:\n{self.trace.rstrip()}")
        return error
