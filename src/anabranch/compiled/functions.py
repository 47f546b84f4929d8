"""Inner loops as machine code, by numba, and the records that they work on.

A ``compiled`` function is written in the part of Python that numba knows, and so are all functions
that it calls. Numba is imported at the first call of such a function: training alone does not load
it. Machine code is kept in the user's own cache folder, under a digest of all functions in it. With
``NUMBA_DISABLE_JIT=1``, or as ``function.py_func``, the function runs in plain Python.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import cache, cached_property, update_wrapper
from hashlib import sha256
from pathlib import Path
from pickle import UnpicklingError
from shutil import rmtree
from types import CodeType, FunctionType
from typing import (
    Annotated,
    Any,
    Generic,
    ParamSpec,
    Protocol,
    TypeVar,
    cast,
    get_args,
    get_origin,
    get_type_hints,
    overload,
)

import numpy as np
from numpy.typing import NDArray

from anabranch.compiled import forked

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Fields = TypeVar("Fields")

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


class Table(Protocol[Fields]):
    """An array of records; assigning to a field of an entry changes the array."""

    def __len__(self) -> int: ...

    @overload
    def __getitem__(self, at: int, /) -> Fields: ...

    @overload
    def __getitem__(self, at: slice, /) -> Table[Fields]: ...

    @overload
    def __getitem__(self, name: str, /) -> NDArray[Any]: ...

    @overload
    def __setitem__(self, at: int, entry: Fields, /) -> None: ...

    @overload
    def __setitem__(self, name: str, column: object, /) -> None: ...


def records(fields: type[Fields], rows: Sequence[tuple[float, ...]] | int) -> Table[Fields]:
    """Return an array of these records, or of a number of records of zeros.

    Args:
        fields: a class whose annotations are the fields of a record, in their order: ``int``,
            ``float``, or arrays of those with their sizes, ``Annotated[Floats, 2, 2]``.
    """
    make = np.zeros if isinstance(rows, int) else np.array
    table: Any = make(rows, record_type(cast(Hashable, fields)))
    return cast("Table[Fields]", table.view(np.recarray))


@cache
def record_type(fields: Hashable) -> np.dtype[np.void]:
    """Return the type of the entries of ``records``."""

    def kind(hint: Any) -> tuple[Any, ...]:
        if get_origin(hint) is Annotated:
            array, *sizes = get_args(hint)
            return (np.int64 if array == Ints else np.float64), tuple(sizes)
        return (np.int64 if hint is int else np.float64,)

    hints = get_type_hints(fields, include_extras=True)
    return np.dtype([(name, *kind(hint)) for name, hint in hints.items()], align=True)


class Compiled(Generic[_Arguments, _Result]):
    """A function that is compiled for each combination of argument types it is called with.

    Attributes:
        py_func: the function in plain Python.
    """

    def __init__(self, function: Callable[_Arguments, _Result]) -> None:
        update_wrapper(self, function)
        self.py_func: Any = function
        self._machine_code: Any = None

    def __call__(self, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        if self._machine_code is None:
            if worker := _begun.pop(self, None):
                worker.results()
                worker.end()
            self._machine_code = self._made(self.folder)
        try:
            result: _Result = self._machine_code(*args, **kwargs)
        except _UNREADABLE:
            rmtree(str(self.folder), ignore_errors=True)
            self._machine_code = self._made(None)
            result = self._machine_code(*args, **kwargs)
        return result

    def for_types_of(self, *args: Any) -> Callable[..., _Result]:
        """Call the function, and return its machine code for arguments of the same types only. That
        does not check their types again, which takes 10 us for many arrays.
        """
        from numba import typeof

        self(*args)  # type: ignore[call-arg]
        code: Callable[..., _Result] = self._machine_code
        if hasattr(code, "get_overload"):  # not with NUMBA_DISABLE_JIT
            code = code.get_overload(tuple(map(typeof, args)))
        return code

    @cached_property
    def folder(self) -> Path | None:
        """Folder of the machine code, named by a digest of the function and all that it calls."""
        parent, digest = code_folder(), sha256(os.environ.get("NUMBA_BOUNDSCHECK", "").encode())
        for words in _contents(self.py_func):
            digest.update(repr(words).encode())
        return parent and parent / f"{self.py_func.__name__}-{digest.hexdigest()[:16]}"

    def _made(self, folder: Path | None) -> Any:
        from numba import config, njit

        settings: Any = config
        linked = _linked(self.py_func, {})
        if folder is None:
            return njit(**_OPTIONS)(linked)
        before, settings.CACHE_DIR = settings.CACHE_DIR, str(folder)
        try:
            return njit(cache=True, **_OPTIONS)(linked)
        finally:
            settings.CACHE_DIR = before


_UNREADABLE = (OSError, EOFError, UnpicklingError, AttributeError, ImportError)
"""Errors of the cache: a full disk, a damaged file, a class of an argument that is no longer there.
"""

_OPTIONS: Any = {"error_model": "numpy", "_nrt": False}
"""Without checks for division by zero, and without reference counts, as no function makes arrays: a
quarter of the time to compile.
"""

_INSIDE: Any = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True, "forceinline": True}
"""For functions that only compiled code calls: without entries from Python, and inline, or a search
takes 1.5 times as long.
"""


def compiled(function: Callable[_Arguments, _Result]) -> Compiled[_Arguments, _Result]:
    """Compile a function, with all that it calls, at its first call; a decorator."""
    return Compiled(function)


WORTH_COMPILING = 3_000_000
"""Turns of an inner loop from which on loading numba is faster than plain Python."""


def compiled_if_worth(
    function: Compiled[_Arguments, _Result], turns: int
) -> Callable[_Arguments, _Result]:
    """Return a function as machine code if numba is loaded or ``turns`` are worth loading it, else
    in plain Python: training makes one schedule, and a search hundreds.
    """
    if "numba" in sys.modules or turns > WORTH_COMPILING:
        return function

    def plain(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        result: _Result = function.py_func(*map(_viewed, args), **kwargs)
        return result

    return plain


def _viewed(argument: Any) -> Any:
    """Replace arrays by views of them whose entries plain Python reads three times as fast."""
    if isinstance(argument, tuple):
        return cast(Any, type(argument))(*map(_viewed, argument))
    return argument.data if isinstance(argument, np.ndarray) else argument


_begun: dict[Compiled[..., Any], forked.ForkedWorker[object] | None] = {}


def compile_ahead(tasks: Mapping[Compiled[..., Any], Callable[[], object]]) -> None:
    """Compile functions without kept machine code in other processes, by tasks that call them. The
    first call here waits for that.
    """
    for function, task in tasks.items():
        is_kept = function.folder is None or function.folder.exists()
        if not is_kept and function not in _begun and forked.cores() > 1:
            _begun[function] = forked.start(lambda run: run(), [task])


def _called(function: FunctionType) -> dict[str, FunctionType]:
    """Return the functions that a function calls by a global name."""
    names = ((name, function.__globals__.get(name)) for name in function.__code__.co_names)
    parts = ((name, getattr(value, "py_func", value)) for name, value in names)
    return {name: part for name, part in parts if isinstance(part, FunctionType)}


def _contents(function: FunctionType) -> Iterator[object]:
    """Generate everything that determines the machine code of a function and of those it calls."""
    code, names = function.__code__, function.__globals__
    constants = [value for value in code.co_consts if not isinstance(value, CodeType)]
    # Kept code knows its module by name, which another version may have put elsewhere.
    yield function.__module__, code.co_code, code.co_varnames, code.co_names, constants
    yield function.__defaults__
    yield [value for name in code.co_names if isinstance(value := names.get(name), (int, float))]
    for part in _called(function).values():
        yield from _contents(part)


def _linked(function: FunctionType, known: dict[FunctionType, Any]) -> FunctionType:
    """Return a copy of a function that calls compiled functions."""
    from numba import njit

    names = dict(function.__globals__)
    for name, part in _called(function).items():
        if part not in known:
            known[part] = njit(**_INSIDE, **_OPTIONS)(_linked(part, known))
        names[name] = known[part]
    return FunctionType(function.__code__, names, function.__name__, function.__defaults__)


def code_folder() -> Path | None:
    """Return the folder of machine code in the user's cache; None if it is not safe or writable."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or "")
    try:
        # The specification of XDG has relative paths ignored.
        folder = (root if root.is_absolute() else Path.home() / ".cache") / "anabranch"
        folder.mkdir(parents=True, exist_ok=True)
        folder = folder.resolve() / "compiled"
        folder.mkdir(mode=0o700, exist_ok=True)
        state = folder.lstat()
        is_private = stat.S_ISDIR(state.st_mode) and not state.st_mode & 0o077
        if is_private and state.st_uid == os.geteuid() and all(map(_is_safe, folder.parents)):
            return folder if os.access(folder, os.W_OK) else None
    except (OSError, RuntimeError):  # a user without a home
        pass
    return None


def _is_safe(folder: Path) -> bool:
    """Return True if no other user but root can replace files in a folder."""
    state = folder.stat()
    is_shared = state.st_mode & 0o022 and not state.st_mode & stat.S_ISVTX
    return state.st_uid in (0, os.geteuid()) and not is_shared
