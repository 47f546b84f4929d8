"""Every exception that anabranch raises on purpose::

    AnabranchError
     +-- WorkloadError
     +-- CaptureError
     +-- FileFormatError
     +-- OutputError
     +-- ProfileError
     +-- InfeasiblePlanError
     +-- BudgetError
     +-- SearchStoppedError
     +-- InvalidPlanError
     +-- NotExpressibleError
     +-- PolicyError
     +-- InvalidScheduleError
     |    +-- DeadlockError
     |    +-- UnknownScheduleError
     +-- DataError
     |    +-- LoaderError
     +-- TrainingError
          +-- StageFailedError
          +-- NonFiniteError

A wrong argument in a call is a plain ``ValueError`` or ``TypeError``.
"""

import difflib
import os
import sys
import sysconfig
import traceback
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, ModuleType


class AnabranchError(Exception):
    """Base class. The message is one paragraph: what, where, the numbers, a way on."""


class WorkloadError(AnabranchError):
    """The user's module, function that makes the workload, or recipe raised an exception."""


class CaptureError(AnabranchError):
    """The model could not be turned into a graph of operators."""


class FileFormatError(AnabranchError):
    """A profile, cluster, plan or checkpoint file is broken; the message names key and value."""


class OutputError(AnabranchError):
    """A file or folder cannot be written; raised before anything is done."""


class ProfileError(AnabranchError):
    """A profile lacks the costs that are needed."""


class NotExpressibleError(AnabranchError):
    """Another program has no form for a plan; the message has every reason."""


class InfeasiblePlanError(AnabranchError):
    """No plan fits the devices; the message says what would."""


class BudgetError(AnabranchError):
    """A search would exceed its limit of states or time; the message has both numbers."""


class SearchStoppedError(AnabranchError):
    """The user ended a search before its first plan."""


class InvalidPlanError(AnabranchError):
    """A plan breaks one of the conditions C1-C4 or a memory limit."""


class PolicyError(AnabranchError):
    """No such weight policy exists, or it does not fit the optimizer, the plan or the model."""


class InvalidScheduleError(AnabranchError):
    """An order of actions that no device could execute."""


class DeadlockError(InvalidScheduleError):
    """Every unfinished device waits for another."""


class UnknownScheduleError(InvalidScheduleError, ValueError):
    """A plan, or the caller, names a schedule that does not exist."""


class DataError(AnabranchError):
    """A data set is missing or damaged, or reading it raised an exception."""


class LoaderError(DataError):
    """The user's function or loader of batches raised an exception; the message names the line."""


class TrainingError(AnabranchError):
    """The run itself cannot go on."""


class StageFailedError(TrainingError):
    """One rank failed; the others were stopped."""


class NonFiniteError(TrainingError):
    """The loss or a gradient became NaN or infinite."""


_OURS = f"{Path(__file__).parent}{os.sep}"


@contextmanager
def naming_line(
    subject: str, otherwise: str = "its import", kind: type[AnabranchError] = WorkloadError
) -> Iterator[None]:
    """Context manager that turns an error of the user's code into one of ours, with its line."""
    try:
        yield
    except AnabranchError:
        raise
    except Exception as error:
        raise kind(with_line(subject, error, otherwise)) from error


def with_line(subject: str, error: Exception, otherwise: str = "its import") -> str:
    """Describe an error of the user's code in one line of text, with the line that raised it."""
    text = " ".join(str(error).split())
    return f"{subject} at {_line_of(error, otherwise)}: {type(error).__name__}: {text}"


def _line_of(error: Exception, otherwise: str = "its import") -> str:
    """File, line and function of the user's innermost frame; ``otherwise`` without one."""
    if isinstance(error, SyntaxError) and error.filename is not None:
        return f"{_from_here(error.filename)}:{error.lineno}"
    skipped = "<", _OURS  # <frozen importlib>, <string> of dataclasses
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(skipped)
    ]
    if not frames:
        return otherwise
    own = [frame for frame in frames if not frame.filename.startswith(_installed())]
    frame = own[-1] if own else frames[0]
    where = "" if frame.name == "<module>" else f", in {frame.name}"
    return f"{_from_here(frame.filename)}:{frame.lineno}{where}"


def warn(text: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the innermost line of the user's; at no line where there is none, as in a rank that
    has been started with a function of ours.
    """
    skipped = ("<", _OURS, *_installed())
    frame: FrameType | None = sys._getframe(1)
    level = 2
    while frame is not None and frame.f_code.co_filename.startswith(skipped):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, category, stacklevel=level)


def shadowed(error: Exception) -> str:
    """Explain an error that is caused by a file or folder with the name of an installed package.

    A folder called z3 or triton, for instance, is imported by torch in place of the package. Empty
    for other errors.
    """
    module = getattr(error, "obj", None) if isinstance(error, AttributeError) else None
    if not isinstance(module, ModuleType):
        return ""
    place = module.__file__ or next(iter(getattr(module, "__path__", ())), "")
    asks = traceback.extract_tb(error.__traceback__)[-1].filename
    if not place or place.startswith(_installed()) or not asks.startswith((*_installed(), _OURS)):
        return ""
    return (
        f"a library looks for the package {module.__name__} and finds {place}, "
        f"which is another one ({error}); rename that, or begin in a folder that does not hold it"
    )


def _installed() -> tuple[str, ...]:
    """Folders of Python's own modules and of installed packages."""
    paths = sysconfig.get_paths()
    return tuple(paths[scheme] for scheme in ("stdlib", "platstdlib", "purelib", "platlib"))


def _from_here(file: str) -> str:
    """Return a path as seen from the current directory, if it lies there."""
    here = Path.cwd()
    return str(Path(file).relative_to(here)) if Path(file).is_relative_to(here) else file


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return `` (is NAME meant?)`` with the known name nearest to a misspelt one, if any is."""
    close = difflib.get_close_matches(name, [*known], 1)
    return f" (is {close[0]} meant?)" if close else ""


def some(names: Iterable[object], most: int = 3) -> str:
    """Name the first few of several things, and count the rest."""
    shown = list(map(str, names))
    rest = f" and {len(shown) - most} more" if len(shown) > most else ""
    return ", ".join(shown[:most]) + rest
