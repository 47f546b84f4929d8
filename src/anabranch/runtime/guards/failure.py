"""The first failure of a run, reported to the user once, with the place where it happened.

One rank fails, then the connections of its neighbours break, then those of their neighbours. Only
one of the exceptions is the cause; consequences have a type of their own::

    rank 1   ValueError in the forward of stage 1         the cause: StageFailedError
    rank 0   connection closed by peer                    a consequence: PeerLostError
    rank 2   connection closed by peer                    a consequence: PeerLostError
"""

from __future__ import annotations

import linecache
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import fx

from anabranch import errors
from anabranch.errors import AnabranchError, StageFailedError, TrainingError
from anabranch.graph.flat_program import FlatProgram
from anabranch.graph.flat_program import frame as module_path
from anabranch.graph.user_lines import user_line
from anabranch.plans.stages import StageGraph
from anabranch.runtime.guards.position import POSITION

_BROKEN = ("gloo/transport", "Connection closed by peer", "Connection reset by peer")
"""Words of torch.distributed if another process is gone."""

_UPDATED = (
    "; if a hook updates parameters in the backward (register_post_accumulate_grad_hook), it does "
    "so for each micro-batch: leave it out, the optimizer of the Workload updates once per step"
)


class PeerLostError(TrainingError):
    """The connection to another rank broke: a consequence of a failure elsewhere, not a cause."""


@contextmanager
def located(rank: int, graph: StageGraph | None = None) -> Iterator[None]:
    """Turn an exception inside into a StageFailedError that says where; our own errors pass."""
    try:
        yield
    except PeerLostError as error:
        raise PeerLostError(f"rank {rank}, {POSITION}: {error}") from error
    except AnabranchError:
        raise
    except Exception as error:
        raise StageFailedError(
            f"rank {rank} failed {POSITION}: {one_line(error)}{_operation(error) or _among(graph)}"
            + _UPDATED * ("modified by an inplace operation" in str(error))
        ) from error


def _operation(error: BaseException) -> str:
    """Return words on the user's module and line that call the failed operation; empty if it is not
    in the traceback, as in a backward.
    """
    for frame, line in traceback.walk_tb(error.__traceback__):
        program, nodes = frame.f_locals.get("self"), []
        if isinstance(program, FlatProgram):
            nodes = [frame.f_locals.get("node")]
        elif isinstance(program, fx.GraphModule) and frame.f_code.co_name == "forward":
            # Each line of the code of a graph assigns to a variable with the name of a node.
            name = linecache.getline(frame.f_code.co_filename, line).partition("=")[0].strip()
            nodes = [node for node in program.graph.nodes if node.name == name]
        for node in nodes:
            if isinstance(node, fx.Node) and node.op.startswith("call"):  # a function or method
                return f"; {module_path(node) or 'the model'} calls it, at {user_line(node)}"
    return ""


def _among(graph: StageGraph | None) -> str:
    """Return the operators of the stage in which this process is, as text."""
    stage = POSITION.stage
    if graph is None or not 0 <= stage < len(graph):
        return ""
    operators = graph.stages[stage].operators
    named = ", ".join(operators) if len(operators) < 5 else f"{operators[0]} .. {operators[-1]}"
    return f"; stage {stage} computes {named}"


def _is_consequence(error: BaseException) -> bool:
    """Return True if a connection broke, in our messages or a collective of the user."""
    text = str(error)
    return isinstance(error, PeerLostError) or (
        isinstance(error, RuntimeError) and any(sign in text for sign in _BROKEN)
    )


def one_line(error: BaseException) -> str:
    """Return type and message on one line, not longer than a paragraph."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:600]}{' ...' if len(text) > 600 else ''}".rstrip(": ")


@dataclass(frozen=True, slots=True)
class Failure:
    """Failure of one rank as plain text; ``kind`` is the exception's class name."""

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
            message = f"rank {rank} failed {POSITION}: {one_line(error)}"
        return Failure(
            rank,
            type(error).__name__,
            message,
            "".join(traceback.format_exception(error)),
            _is_consequence(error),
        )

    def exception(self) -> AnabranchError:
        """Return the exception for the caller, of the same class if it is one of ours."""
        kind = getattr(errors, self.kind, StageFailedError)
        error: AnabranchError = kind(self.message)
        if self.trace:
            error.add_note(f"Traceback of rank {self.rank}:\n{self.trace.rstrip()}")
        return error
