"""Compilation of inner loops, and where machine code is kept.

LLVM compiles, in a process of its own, so that it can begin before the code is needed (``begin``).
Kept is object code that LLVM loads by itself; it is kept by what the functions consist of.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import subprocess
import sys
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache, cached_property
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from shutil import rmtree
from tempfile import NamedTemporaryFile, mkdtemp
from types import CodeType, FunctionType, ModuleType
from typing import Any, TypeVar, cast

import numpy as np

Function = TypeVar("Function", bound=Callable[..., Any])

Kind = tuple[Any, Any]
"""Type of an argument: of an array its entries, as ``numpy.dtype.descr`` has them, and dimensions;
of a named tuple of arrays its module and name, and theirs; of numbers their class and 0.
"""


def entry(function: Function) -> Function:
    """A function that Python calls: compiled with all that it calls when it is called first, and
    kept on disk for other processes, where there is a folder to write to. It takes numbers, arrays
    in C order and named tuples of those, and returns a number or nothing; ``compiler`` says what
    may be in it.
    """
    return cast(Function, _Entry(function))


class _Entry:
    """A function with the machine code for each list of kinds of arguments that it was called
    with.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.__wrapped__: Any = function
        self._codes: dict[tuple[Kind, ...], Any] = {}

    def __call__(self, *args: Any) -> Any:
        kinds = tuple(map(_kind, args))
        numbers = [arg for arg, (_, size) in zip(args, kinds, strict=True) if size == 0]
        return _Call(self, kinds, args)(*numbers)

    @cached_property
    def digest(self) -> str:
        """Of all that decides what it is compiled to."""
        from llvmlite import __version__
        from llvmlite import binding as llvm

        processor = llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()
        found = sha256(repr((__version__, llvm.get_default_triple(), processor)).encode())
        for path in sorted(Path(__file__).parent.glob("*.py")):
            found.update(path.read_bytes())
        for words in _contents(self, set()):
            found.update(repr(words).encode())
        return found.hexdigest()

    @property
    def returns(self) -> str:
        """The class of its result; nothing is 0."""
        returns: str = self.__wrapped__.__annotations__["return"]
        return "int" if returns == "None" else returns

    def file(self, kinds: tuple[Kind, ...]) -> Path:
        """Where the machine code is kept."""
        name = f"{self.__wrapped__.__module__}.{self.__wrapped__.__name__}"
        digest = sha256(repr((self.digest, kinds, self.returns)).encode()).hexdigest()
        return code_folder() / f"{name}.{digest[:16]}.o"

    def code(self, kinds: tuple[Kind, ...]) -> Any:
        """The machine code, as soon as there is some."""
        if kinds not in self._codes:
            path = self.file(kinds)
            content = _kept(path)
            if content is None:
                # Unless another process has just put it there.
                _begin([(self, kinds)])
                compiler = _compilers.get((os.getpid(), path))
                status = _ended(compiler) if compiler else 0
                content = _kept(path)
            if content is None:
                _compilers.pop((os.getpid(), path), None)  # the next call tries it again
                name = self.__wrapped__.__name__
                raise RuntimeError(
                    f"{name} could not be compiled: its process ended with {status} and says why, "
                    f"or was killed, as it is after {LONGEST_S:g} s; try again"
                )
            self._codes[kinds] = _loaded(content, kinds, self.returns)
        return self._codes[kinds]


def _contents(function: Any, known: set[Any]) -> Iterator[Any]:
    """What a function consists of, and all that it calls."""
    function = plain(function)
    if function in known or not isinstance(function, FunctionType):
        return
    known.add(function)
    code, names = function.__code__, function.__globals__
    constants = [value for value in code.co_consts if not isinstance(value, CodeType)]
    yield code.co_code, code.co_varnames, code.co_names, constants
    modules = [names[name] for name in code.co_names if isinstance(names.get(name), ModuleType)]
    inside = (getattr(module, name, None) for module in modules for name in code.co_names)
    for value in (*map(names.get, code.co_names), *inside):
        if isinstance(value, (int, float)):
            yield value
        else:
            yield getattr(value, "_fields", ())
            yield from _contents(value, known)


_compilers: dict[tuple[int, Path], subprocess.Popen[bytes]] = {}
"""By who began them, for a forked process cannot wait for those of the other, and what they make.
"""


LONGEST_S = 120.0
"""Seconds that a compiler may take from when its code is needed; it takes one or two."""


def _ended(compiler: subprocess.Popen[bytes]) -> int:
    """The status with which a compiler ends, by itself or after that time."""
    try:
        return compiler.wait(LONGEST_S)
    except subprocess.TimeoutExpired:
        compiler.kill()
        return compiler.wait()


def begin(*calls: tuple[Callable[..., Any], Sequence[Any]]) -> None:
    """Begin to compile entries for arguments like these, in one process and in this order, as far
    as they are not kept: the first call of each waits for it.
    """
    _begin([(cast(_Entry, function), tuple(map(_kind, args))) for function, args in calls])


def _begin(calls: Sequence[tuple[_Entry, tuple[Kind, ...]]]) -> None:
    asked = []
    for called, kinds in calls:
        path, function = called.file(kinds), called.__wrapped__
        if (os.getpid(), path) not in _compilers and _kept(path) is None:
            asked.append((function.__module__, function.__name__, kinds, called.digest, str(path)))
    if not asked:
        return
    run = "import ast, sys; sys.path[:], *asked = ast.literal_eval(sys.argv[1]); "
    run += f"from {__name__} import compile_for; compile_for(*asked)"
    compiler = subprocess.Popen(
        # Without -P it would import what lies in the working directory, without -O see docstrings
        # that are not there.
        [
            sys.executable,
            "-P",
            *["-O"] * sys.flags.optimize,
            "-c",
            run,
            repr((list(map(str, sys.path)), *asked)),
        ],
        start_new_session=True,  # Ctrl-C is for this process
    )
    atexit.register(compiler.kill)
    _compilers.update(((os.getpid(), Path(path)), compiler) for *_, path in asked)


class _Call:
    """A call of an entry for these arrays; numbers come with each call.

    The code takes numbers, and where all else is in a row of words: of an array where its entries
    are, and its sizes.
    """

    def __init__(self, function: _Entry, kinds: tuple[Kind, ...], args: Sequence[Any]) -> None:
        words = array("q")
        for arg in _arrays(args):
            # It has to be in C order for this, which is ten times as quick as ``arg.ctypes``.
            words.append(ctypes.addressof(_PLACE.from_buffer(arg)))
            words.extend(arg.shape)
        self._words, (self._place, _) = words, words.buffer_info()
        self._function, self._kinds, self._arrays = function, kinds, args
        self._code: Any = None

    def __call__(self, *numbers: float) -> Any:
        if self._code is None:
            self._code = self._function.code(self._kinds)
        return self._code(self._place, *numbers)


_PLACE: Any = ctypes.c_char * 0
"""What has a place and no size."""


def _arrays(args: Sequence[Any]) -> Iterator[Any]:
    """The arrays among arguments, and in tuples among these."""
    for arg in args:
        if isinstance(arg, np.ndarray):
            yield arg
        elif isinstance(arg, tuple):
            yield from _arrays(arg)


def bound(function: Callable[..., Any], *example: Any) -> Callable[..., Any]:
    """An entry for these very arrays, which is called with its numbers alone: quicker than a short
    function would be with all of them.
    """
    return _Call(cast(_Entry, function), tuple(map(_kind, example)), example)


def compile_for(*asked: tuple[str, str, tuple[Kind, ...], str, str]) -> None:
    """Write object code: of module, name, kinds of arguments, digest and where to put it."""
    for module, name, kinds, digest, path in asked:
        function: _Entry = getattr(import_module(module), name)
        if digest != function.digest:
            raise SystemExit("anabranch was changed on disk while it ran: start it again")
        content = object_code(function.__wrapped__, kinds, function.returns)
        # Whole or not at all.
        with NamedTemporaryFile(dir=Path(path).parent, delete=False) as file:
            file.write(sha256(content).digest() + content)
        os.replace(file.name, path)


def object_code(function: Callable[..., Any], kinds: Sequence[Kind], returns: str) -> bytes:
    """What LLVM makes of a function for arguments of these kinds."""
    from llvmlite import binding as llvm

    from anabranch.jit.compiler import text_of

    machine = _machine()
    types = [_type(*kind) for kind in kinds]
    target = f'target datalayout = "{machine.target_data}"\ntarget triple = "{machine.triple}"\n'
    code = llvm.parse_assembly(target + text_of(function, types, _type(returns, 0)))
    options = llvm.create_pipeline_tuning_options(speed_level=3)
    builder = llvm.create_pass_builder(machine, options)
    builder.getModulePassManager().run(code, builder)
    content: bytes = machine.emit_object(code)
    return content


def _kept(path: Path) -> bytes | None:
    """Object code on disk, behind its digest: of a file that was cut short LLVM would crash."""
    with suppress(OSError):
        content = path.read_bytes()
        if sha256(content[32:]).digest() == content[:32]:
            return content[32:]
    return None


def _type(kind: Any, dimensions: Any) -> Any:
    """For the compiler."""
    from anabranch.jit import values

    if isinstance(dimensions, tuple):
        module, name = kind
        entries = tuple(_type(*entry) for entry in dimensions)
        return values.Group(entries, getattr(import_module(module), name)._fields)
    if not dimensions:
        return {"bool": values.BOOL, "int": values.INT, "float": values.FLOAT}[kind]
    entry_type = np.dtype(kind) if isinstance(kind, str) else np.dtype(list(kind), align=True)
    assert isinstance(kind, str) or entry_type.descr == list(kind), "a record with gaps"
    return values.Array(entry_type, dimensions)


def _kind(arg: Any) -> Kind:
    if isinstance(arg, np.ndarray):
        return _entries(arg.dtype), arg.ndim
    if isinstance(arg, tuple):
        return (type(arg).__module__, type(arg).__name__), tuple(map(_kind, arg))
    for name, known in _NUMBERS.items():
        if isinstance(arg, known):
            return name, 0
    raise TypeError(f"{arg!r} is no number, array or named tuple")


@cache
def _entries(dtype: np.dtype[Any]) -> Any:
    return tuple(dtype.descr) if dtype.names else dtype.str


_NUMBERS = {"bool": (bool, np.bool_), "float": (float, np.floating), "int": (int, np.integer)}

_C_TYPES: dict[str, Any] = {"bool": ctypes.c_bool, "float": ctypes.c_double, "int": ctypes.c_int64}

_engines: list[Any] = []
"""What machine code lives in."""


def _loaded(content: bytes, kinds: Sequence[Kind], returns: str) -> Any:
    from llvmlite import binding as llvm

    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), _machine())
    engine.add_object_file(llvm.ObjectFileRef.from_data(content))
    engine.finalize_object()
    _engines.append(engine)
    numbers = [_C_TYPES[kind] for kind, size in kinds if size == 0]
    code = ctypes.CFUNCTYPE(_C_TYPES[returns], ctypes.c_int64, *numbers)
    return code(engine.get_function_address("run"))


def _machine() -> Any:
    from llvmlite import binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    features = llvm.get_host_cpu_features().flatten()
    return llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=features, opt=3, jit=True
    )


@cache
def code_folder() -> Path:
    """Where machine code is kept, by this process alone where nothing can be written."""
    for parent in _parents():
        folder = parent / "compiled"
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            if os.access(folder, os.W_OK):
                return folder
    folder = Path(mkdtemp())
    atexit.register(rmtree, folder, ignore_errors=True)
    return folder


def is_there(function: Callable[..., Any], *args: Any) -> bool:
    """Whether an entry has machine code by now, or some on disk, for arguments like these."""
    called, kinds = cast(_Entry, function), tuple(map(_kind, args))
    return kinds in called._codes or _kept(called.file(kinds)) is not None


def plain(function: Callable[..., Any]) -> Callable[..., Any]:
    """An entry as plain Python, which takes lists for arrays, of objects for records."""
    return getattr(function, "__wrapped__", function)


def _parents() -> Iterator[Path]:
    """Folders to try: beside the sources as Python does it, the user's cache."""
    yield Path(__file__).parent / "__pycache__"
    with suppress(RuntimeError):  # a user without a home
        yield Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "anabranch"
