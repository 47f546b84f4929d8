"""Compilation of inner loops, and where machine code is kept.

Numba compiles, in a process of its own, so that it can begin before the code is needed
(``begin``). Kept is plain object code that LLVM loads by itself: importing numba and loading its
own cache takes a second. It is kept by all files that formulas may come from.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache, cached_property
from hashlib import sha256
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from shutil import rmtree
from tempfile import NamedTemporaryFile, mkdtemp
from types import FunctionType
from typing import Any, TypeVar, cast

import numpy as np

Function = TypeVar("Function", bound=Callable[..., Any])

_OPTIONS = {
    **{"error_model": "numpy", "_nrt": False},
    **{"no_cpython_wrapper": True, "no_cfunc_wrapper": True},
}
"""Nobody makes arrays, so nobody counts references: quicker, above all to compile."""

_PACKAGE = Path(__file__).parent

SOURCES = (
    "planner/auto/stage_*.py",
    "planner/dapple/links.py",
    "planner/dapple/objective.py",
    "planner/dapple/search.py",
    "planner/graphpipe/partitioner.py",
    "planner/pipedream/memory.py",
    "planner/pipedream/recurrence.py",
    "planner/piper/search.py",
    "simulator/engine.py",
    "simulator/events.py",
    "simulator/records.py",
    "jit.py",
    "cost/buckets.py",
    "cost/communication.py",
    "cost/memory.py",
    "cost/overheads.py",
    "cost/passes.py",
    "cost/period.py",
    "cost/stage_weights.py",
    "plans/in_flight.py",
)
"""Files of the package that are compiled, or have formulas or numbers that are."""

Kind = tuple[Any, Any]
"""Type of an argument: of an array its entries, as ``numpy.dtype.descr`` has them, and dimensions;
of a named tuple of arrays its module and name, and theirs; of others ``int`` or ``float``, and 0.
"""


def compiled(function: Function) -> Function:
    """The function, which is compiled where compiled functions call it; it makes no arrays."""
    _compiled[cast(FunctionType, function)] = _Compiled(function)
    return function


def entry(function: Function) -> Function:
    """A function that Python calls: compiled with all that it calls when it is called first, and
    kept on disk for other processes, where there is a folder to write to. It makes no arrays, takes
    numbers, arrays in C order and named tuples of those, and returns a number or nothing.
    """
    return cast(Function, _Entry(function))


class _Compiled:
    """A function as it stands, until something needs its machine code."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function: Any = function

    @cached_property
    def dispatcher(self) -> Any:
        """Numba's, for what arguments it is called with."""
        return self.jitted()

    def jitted(self, *signature: Any) -> Any:
        """Numba's, with those of all functions that this one calls."""
        import numba

        code, names = self.function.__code__, dict(self.function.__globals__)
        for name in code.co_names:
            called = names.get(name)
            if isinstance(called, FunctionType):
                called = _compiled.get(called)
            if isinstance(called, _Compiled):
                names[name] = called.dispatcher
        jit: Any = numba.njit  # its types lack some options
        return jit(*signature, **_OPTIONS)(FunctionType(code, names, self.function.__name__))


_compiled: dict[FunctionType, _Compiled] = {}
"""Functions that compiled functions may call."""


class _Entry(_Compiled):
    """A function with the machine code for each list of kinds of arguments that it was called
    with.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        self._codes: dict[tuple[Kind, ...], Any] = {}

    def __call__(self, *args: Any) -> Any:
        kinds = tuple(map(_kind, args))
        return _Call(self, kinds, args)(*(arg for arg in args if isinstance(arg, (int, float))))

    def file(self, kinds: tuple[Kind, ...]) -> Path:
        """Where the machine code is kept."""
        name = f"{self.function.__module__}.{self.function.__name__}"
        return code_folder() / f"{name}.{sha256(repr(kinds).encode()).hexdigest()[:16]}.o"

    def code(self, kinds: tuple[Kind, ...]) -> Any:
        """The machine code, as soon as there is some."""
        if kinds not in self._codes:
            path = self.file(kinds)
            content = _kept(path)
            if content is None:
                # Unless another process has just put it there.
                if _begin([(self, kinds)]) or (os.getpid(), path) in _compilers:
                    _compilers[os.getpid(), path].wait()
                content = _kept(path)
            if content is None:
                name = self.function.__name__
                raise RuntimeError(f"{name} could not be compiled; its process says why")
            self._codes[kinds] = _loaded(content, kinds)
        return self._codes[kinds]


_compilers: dict[tuple[int, Path], subprocess.Popen[bytes]] = {}
"""By who began them, for a forked process cannot wait for those of the other, and what they make.
"""


def begin(*calls: tuple[Callable[..., Any], Sequence[Any]], nice: int = 0) -> bool:
    """Begin to compile entries for arguments like these, in one process, as far as they are not
    kept: the first call of each waits for it. Whether something has to be compiled.

    Args:
        nice: so much the process gives way to others, see ``os.nice``.
    """
    asked = [(cast(_Entry, function), tuple(map(_kind, args))) for function, args in calls]
    return _begin(asked, nice)


def _begin(calls: Sequence[tuple[_Entry, tuple[Kind, ...]]], nice: int = 0) -> bool:
    asked = []
    for called, kinds in calls:
        path, function = called.file(kinds), called.function
        if (os.getpid(), path) not in _compilers and _kept(path) is None:
            asked.append((function.__module__, function.__name__, kinds, str(path)))
    if not asked:
        return False
    # All that is made lives to the end.
    run = f"import ast, gc, os, sys; gc.disable(); os.nice({nice}); "
    run += "sys.path[:], *asked = ast.literal_eval(sys.argv[1]); "
    run += f"from {__name__} import compile_for; compile_for(*asked)"
    compiler = subprocess.Popen(
        # Without -P it would import what lies in the working directory.
        [sys.executable, "-P", "-c", run, repr((list(map(str, sys.path)), _digest(), asked))],
        # Optimised is the whole of it, once.
        env={**os.environ, "NUMBA_OPT": "0", "NUMBA_DISABLE_JIT": "0"},
        start_new_session=True,  # Ctrl-C is for this process
    )
    atexit.register(compiler.kill)
    _compilers.update(((os.getpid(), Path(path)), compiler) for *_, path in asked)
    return True


class _Call:
    """A call of an entry for these arrays; numbers come with each call.

    The code takes numbers, and where all else is in a row of words, which is as numba passes it:
    where to put the result and an error, and of an array two owners, which it does not have,
    entries, bytes of one, where they are, sizes, strides.
    """

    def __init__(self, function: _Entry, kinds: tuple[Kind, ...], args: Sequence[Any]) -> None:
        returns = function.function.__annotations__["return"]
        self._result: Any = ctypes.c_double() if returns == "float" else ctypes.c_int64()
        self._error = ctypes.c_void_p()
        words = [ctypes.addressof(self._result), ctypes.addressof(self._error)]
        for (_, dimensions), arg in _flat(kinds, args):
            if dimensions:
                assert arg.flags.c_contiguous
                words += (0, 0, arg.size, arg.itemsize, arg.ctypes.data, *arg.shape, *arg.strides)
        self._words = (ctypes.c_int64 * len(words))(*words)
        self._place = ctypes.addressof(self._words)
        self._function, self._kinds, self._arrays = function, kinds, args
        self._code: Any = None

    def __call__(self, *numbers: float) -> Any:
        if self._code is None:
            self._code = self._function.code(self._kinds)
        failed = self._code(self._place, *numbers)
        assert not failed
        return self._result.value


def _flat(kinds: Sequence[Kind], args: Sequence[Any]) -> Iterator[tuple[Kind, Any]]:
    """Arguments, the entries of tuples in place of these."""
    for kind, arg in zip(kinds, args, strict=True):
        if isinstance(arg, tuple):
            yield from _flat(kind[1], arg)
        else:
            yield kind, arg


def bound(function: Callable[..., Any], *example: Any) -> Callable[..., Any]:
    """An entry for these very arrays, which is called with its numbers alone: quicker than a short
    function would be with all of them.
    """
    return _Call(cast(_Entry, function), tuple(map(_kind, example)), example)


def compile_for(digest: str, asked: Sequence[tuple[str, str, tuple[Kind, ...], str]]) -> None:
    """Write object code: of module, name, kinds of arguments and where to put it; for a process
    with sources of this digest.
    """
    import numba
    from llvmlite import binding as llvm

    if digest != _digest():
        raise SystemExit("anabranch was changed on disk while it ran: start it again")
    _leave_out_machine_code()
    machine = _machine()
    options = llvm.create_pipeline_tuning_options(speed_level=3)
    for module, name, kinds, path in asked:
        function: _Entry = getattr(import_module(module), name)
        returns = _returned(function)
        jitted = function.jitted(returns(*(_numba_type(*kind) for kind in kinds)))
        (signature,) = jitted.signatures
        native = jitted.overloads[signature].fndesc.llvm_func_name
        with numba.core.compiler_lock.global_compiler_lock, suppress(RuntimeError):  # it has been
            jitted.overloads[signature].library.finalize()
        code = llvm.parse_assembly(jitted.inspect_llvm(signature))
        for defined in (f for f in code.functions if not f.is_declaration):
            if defined.name == native:
                caller = _caller(defined, kinds)
            else:
                defined.linkage = llvm.Linkage.internal
        code.link_in(llvm.parse_assembly(caller))
        code.get_function(native).linkage = llvm.Linkage.internal
        builder = llvm.create_pass_builder(machine, options)
        builder.getModulePassManager().run(code, builder)
        # Whole or not at all.
        content = machine.emit_object(code)
        with NamedTemporaryFile(dir=Path(path).parent, delete=False) as file:
            file.write(sha256(content).digest() + content)
        os.replace(file.name, path)


def _caller(native: Any, kinds: tuple[Kind, ...]) -> str:
    """A function that is called as ``_Call`` does it and calls another, in LLVM's language."""
    types = [str(argument.type) for argument in native.arguments]
    word = "ptr" if "ptr" in types else "i64*"  # which LLVM told apart once
    given, read, words = ["i64 %words"], list[str](), 0
    for i, number in enumerate(("", "", *_numbers(kinds))):
        if number:
            given.append(f"{number} %a{i}")
            continue
        cast = "bitcast" if types[i] == "i64" else "inttoptr"
        read += [
            f"%at{i} = add i64 %words, {8 * words}",
            f"%from{i} = inttoptr i64 %at{i} to {word}",
            f"%word{i} = load i64, {word} %from{i}",
            f"%a{i} = {cast} i64 %word{i} to {types[i]}",
        ]
        words += 1
    passed = ", ".join(f"{kind} %a{i}" for i, kind in enumerate(types))
    lines = [
        f'declare i32 @"{native.name}"({", ".join(types)})',
        f"define i32 @run({', '.join(given)}) {{",
        *read,
        f'%failed = call i32 @"{native.name}"({passed})',
        "ret i32 %failed",
        "}",
    ]
    return "\n".join(lines)


def _leave_out_machine_code() -> None:
    """Let numba, in a process that runs nothing, make no machine code of the functions that others
    call: that would take half of the time, and what is kept is compiled as a whole. Where numba has
    other names for this it takes that time.
    """
    with suppress(ImportError):
        from numba.core.codegen import JITCodeLibrary
        from numba.core.cpu import CPUContext

        if hasattr(JITCodeLibrary, "_finalize_specific") and hasattr(CPUContext, "get_executable"):
            JITCodeLibrary._finalize_specific = lambda self: None  # type: ignore[method-assign]
            # Something that could be called; nobody does.
            CPUContext.get_executable = lambda *_: [].append  # type: ignore[method-assign]


def _kept(path: Path) -> bytes | None:
    """Object code on disk, behind its digest: of a file that was cut short LLVM would crash."""
    with suppress(OSError):
        content = path.read_bytes()
        if sha256(content[32:]).digest() == content[:32]:
            return content[32:]
    return None


def _returned(function: _Entry) -> Any:
    import numba

    types: Any = numba.types
    returns = {"int": types.int64, "float": types.float64, "None": types.none}
    return returns[function.function.__annotations__["return"]]


def _numba_type(kind: Any, dimensions: Any) -> Any:
    import numba

    types: Any = numba.types
    if isinstance(dimensions, tuple):
        module, name = kind
        entries = [_numba_type(*entry) for entry in dimensions]
        found = types.NamedTuple(entries, getattr(import_module(module), name))
        # Otherwise it has all fields of all records, in the name of every function that takes it.
        found.name = name
        return found
    if not dimensions:
        return {"int": types.int64, "float": types.float64}[kind]
    entry_type = np.dtype(kind) if isinstance(kind, str) else np.dtype(list(kind), align=True)
    assert isinstance(kind, str) or entry_type.descr == list(kind), "a record with gaps"
    of_entries: Any = numba.from_dtype
    return types.Array(of_entries(entry_type), dimensions, "C")


def _kind(arg: Any) -> Kind:
    if isinstance(arg, tuple):
        return (type(arg).__module__, type(arg).__name__), tuple(map(_kind, arg))
    if isinstance(arg, np.ndarray):
        return tuple(arg.dtype.descr) if arg.dtype.names else arg.dtype.str, arg.ndim
    return "float" if isinstance(arg, float) else "int", 0


_Code = ctypes.CFUNCTYPE(ctypes.c_int32)

_engines: list[Any] = []
"""What machine code lives in."""


def _numbers(kinds: Sequence[Kind]) -> Iterator[str]:
    """Of all that numba passes for such arguments, the types of numbers; see ``_Call``."""
    for kind, dimensions in kinds:
        if isinstance(dimensions, tuple):
            yield from _numbers(dimensions)
        elif dimensions:
            yield from ("",) * (5 + 2 * dimensions)
        else:
            yield "double" if kind == "float" else "i64"


def _loaded(content: bytes, kinds: tuple[Kind, ...]) -> Any:
    from llvmlite import binding as llvm

    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), _machine())
    engine.add_object_file(llvm.ObjectFileRef.from_data(content))
    engine.finalize_object()
    _engines.append(engine)
    code = _Code(engine.get_function_address("run"))
    c_types: dict[str, Any] = {"double": ctypes.c_double, "i64": ctypes.c_int64}
    code.argtypes = (ctypes.c_int64, *(c_types[number] for number in _numbers(kinds) if number))
    return code


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
    """Where machine code of these very sources is kept, by this process alone where nothing can be
    written.
    """
    name = f"compiled-{_digest()}"
    for parent in _parents():
        folder = parent / name
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
    return cast(_Entry, function).function  # type: ignore[no-any-return]


def _parents() -> Iterator[Path]:
    """Folders to try: the user's word, beside the sources as Python does it, the user's cache."""
    if asked := os.environ.get("NUMBA_CACHE_DIR"):
        yield Path(asked)
    yield Path(__file__).parent / "__pycache__"
    with suppress(RuntimeError):  # a user without a home
        yield Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "anabranch"


@cache
def _digest() -> str:
    from llvmlite import binding as llvm

    processor = llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()
    found = sha256(repr((version("numba"), llvm.get_default_triple(), processor)).encode())
    for source in SOURCES:
        for path in sorted(_PACKAGE.glob(source)):
            found.update(path.read_bytes())
    return found.hexdigest()[:16]
