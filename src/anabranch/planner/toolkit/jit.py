"""Compilation of planners' functions, and where machine code is kept.

Numba keeps what it has compiled beside the file of a function and looks at that file alone to see
whether it still holds. Here it is kept by all files that formulas may come from.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar, cast

import numba

Function = TypeVar("Function", bound=Callable[..., Any])

# Its types lack some options.
_njit: Any = numba.njit
_typeof: Any = numba.typeof
_config: Any = numba.config

_OPTIONS = {"error_model": "numpy", "_nrt": False}
"""Nobody makes arrays, so nobody counts references: quicker, above all to compile."""

_PACKAGE = Path(__file__).parents[2]

SOURCES = (
    "planner/auto/stage_*.py",
    "planner/graphpipe/partitioner.py",
    "planner/pipedream/memory.py",
    "planner/pipedream/recurrence.py",
    "cost/buckets.py",
    "cost/communication.py",
    "cost/memory.py",
    "cost/passes.py",
    "cost/period.py",
    "cost/stage_weights.py",
    "plans/in_flight.py",
)
"""Files of the package that are compiled, or have formulas or numbers that are."""


def compiled(function: Function) -> Function:
    """A function that compiled functions call, and nobody else; it makes no arrays."""
    unused = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    return cast(Function, _njit(**_OPTIONS, **unused)(function))


def entry(function: Function) -> Function:
    """A function that Python calls: compiled with all that it calls when it is called first, and
    kept on disk for other processes, where there is a folder to write to. It makes no arrays.
    """
    folder = code_folder()
    before = _config.CACHE_DIR
    try:
        # Read once, as the function is decorated.
        _config.CACHE_DIR = str(folder or "")
        jitted = _njit(cache=folder is not None, no_cfunc_wrapper=True, **_OPTIONS)(function)
    finally:
        _config.CACHE_DIR = before
    return cast(Function, jitted)


def bound(function: Callable[..., Any], *example: object) -> Callable[..., Any]:
    """An entry for arguments of the types of these: called without a look at their types, which
    takes longer than a short function.
    """
    jitted: Any = function
    types = tuple(_typeof(argument) for argument in example)
    jitted.compile(types)
    code: Callable[..., Any] = jitted.get_overload(types)
    return code


@cache
def code_folder() -> Path | None:
    """Where machine code of these very sources is kept; None where nothing can be written."""
    name = f"compiled-{_digest()}"
    for parent in _parents():
        folder = parent / name
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(folder, os.W_OK):
            return folder
    return None


def is_kept(module: str) -> bool:
    """Whether machine code of a module of planners, such as ``stage_clock``, is on disk."""
    folder = code_folder()
    return folder is not None and any(folder.rglob(f"{module}.*.nbc"))


def _parents() -> Iterator[Path]:
    """Folders to try: the user's word, beside the sources as Python does it, the user's cache."""
    if _config.CACHE_DIR:
        yield Path(_config.CACHE_DIR)
    yield Path(__file__).parent / "__pycache__"
    yield Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "anabranch"


def _digest() -> str:
    found = sha256(numba.__version__.encode())
    for source in SOURCES:
        for path in sorted(_PACKAGE.glob(source)):
            found.update(path.read_bytes())
    return found.hexdigest()[:16]
