"""A compiler for inner loops: functions of a small part of Python as LLVM's language.

What a function may consist of says the end of this file, what it computes ``arithmetic``; all else
is refused, with its line. It takes what ``values`` knows, calls other such functions and makes no
arrays. A function is compiled anew for each list of types that it is called with. What a variable
is follows from what it is given: whole numbers and floats make it a float. Everything is written
down as it stands, variables and all: LLVM has passes for the rest.

The result is Python's to the last bit, but for this, which is for whoever writes such a function to
keep out of:

- Whole numbers have 64 bits: sums and products beyond them wrap, ``int`` of a float gives the
  nearest, of NaN 0. Where they become floats, those beyond 2^53 are rounded, and 0 may be -0.
- Whole numbers divide by zero to zero, floats to infinity or NaN. ``//`` of floats may give -0.
- Bounds are not checked, neither of slices, and an index below zero counts from the end only where
  it stands there as a number. What an array holds is taken as Python's numbers, not NumPy's.
- ``np.maximum`` and ``np.minimum`` are ``max`` and ``min``, with NaN as well.
- A range goes down where its step stands there as a number below zero. A variable that was given
  nothing yet may have any value.
"""

from __future__ import annotations

import ast
import builtins
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np

from anabranch.jit.arithmetic import Arithmetic, RefusedError
from anabranch.jit.values import (
    BOOL,
    FLOAT,
    INT,
    NOTHING,
    ONE,
    ZERO,
    Array,
    Group,
    Number,
    Record,
    Type,
    Value,
    common,
    constant,
    entries,
    grouped,
    known,
    parts,
    whole,
)

_RESULT = "return"
"""A variable that Python cannot have."""


def text_of(function: Callable[..., Any], types: Sequence[Type], returns: Number) -> str:
    """A function with all that it calls, in LLVM's language, as ``run``: that takes the place of a
    row of words, in which the parts of arrays are, and then all numbers. Nothing is returned as 0.
    """
    module = Module()
    called = module.function(function, types)
    if called.returns not in (returns, NOTHING.type):
        raise called.refused(f"it returns {called.returns}, not {returns}")
    lines, given, arguments = list[str](), ["ptr %words"], list[str]()
    for kind in _single(types):
        for part in parts(kind):
            name = f"%a{len(arguments)}"
            arguments.append(f"{part} {name}")
            if isinstance(kind, Number):
                given.append(arguments[-1])
            else:
                words = f"%w{len(arguments)}"
                lines.append(f"{words} = getelementptr i64, ptr %words, i64 {len(lines) // 2}")
                lines.append(f"{name} = load {part}, ptr {words}")
    call = f"call {whole(called.returns)} @{called.name}({', '.join(arguments)})"
    result = "0" if called.returns == NOTHING.type else "%result"
    lines += [call if result == "0" else f"{result} = {call}", f"ret {returns} {result}"]
    extended = "zeroext " if returns == BOOL else ""  # as C has it
    run = [f"define {extended}{returns} @run({', '.join(given)}) {{", *lines, "}"]
    return "\n".join([*module.texts, *run])


def _single(types: Sequence[Type]) -> list[Type]:
    """Types, the entries of tuples in place of these."""
    return [
        found
        for kind in types
        for found in (_single(kind.entries) if isinstance(kind, Group) else [kind])
    ]


class Module:
    """Functions that call each other."""

    def __init__(self) -> None:
        self.texts = [
            "declare double @llvm.fabs.f64(double)",
            "declare double @llvm.rint.f64(double)",
            "declare i64 @llvm.fptosi.sat.i64.f64(double)",
            "declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)",
        ]
        self._functions: dict[tuple[Any, ...], _Function] = {}

    def function(self, function: Callable[..., Any], types: Sequence[Type]) -> _Function:
        """A function for arguments of these types."""
        key = function, *types
        if key not in self._functions:
            found = self._functions[key] = _Function(self, function, f"f{len(self._functions)}")
            self.texts.append(found.text(types))
        return self._functions[key]


@cache
def _definitions(path: str) -> Mapping[int, ast.FunctionDef]:
    """The functions of a file by the lines that they begin in."""
    tree = ast.parse(Path(path).read_text(encoding="utf-8"))
    found = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    return {min([f.lineno, *(d.lineno for d in f.decorator_list)]): f for f in found}


class _Function(Arithmetic):
    """One function for arguments of some types."""

    def __init__(self, module: Module, function: Callable[..., Any], name: str) -> None:
        super().__init__()
        code = function.__code__
        self._module, self._globals, self.name = module, function.__globals__, name
        self._definition = _definitions(code.co_filename)[code.co_firstlineno]
        self._code, self._at = code, self._definition.lineno
        self._variables: dict[str, Type] = {}
        self._loops: list[tuple[str, str]] = []
        self._is_settled, self._is_done = False, False

    @property
    def returns(self) -> Type:
        """What it returns; known once all of it has been compiled."""
        if not self._is_done:
            raise self.refused("it calls itself")
        return self._variables[_RESULT]

    def text(self, types: Sequence[Type]) -> str:
        """The function in LLVM's language."""
        given: list[str] = []
        if len(types) != self._code.co_argcount:
            raise self.refused(f"it takes {self._code.co_argcount} arguments, not {len(types)}")
        while not self._is_settled:  # as long as a variable turns out to be more than it seemed
            self._is_settled, self._lines, given = True, [], []
            for name, kind in zip(self._code.co_varnames, types, strict=False):
                names = tuple(f"%a{len(given) + i}" for i in range(len(parts(kind))))
                given += Value(kind, names).pairs()
                self._write(name, Value(kind, names))
            if not self._block(self._definition.body):
                self._write(_RESULT, NOTHING)
                self._jump("end")
        self._is_done = True
        self._label("end")
        result = self._read(_RESULT)
        kind, found = whole(result.type), "".join(result.parts[:1])
        if len(result.parts) > 1:
            found = "undef"
            for i, pair in enumerate(result.pairs()):
                found = self._new(f"insertvalue {kind} {found}, {pair}, {i}")
        slots = [
            f"%{name}.{i} = alloca {part}"
            for name, variable in self._variables.items()
            for i, part in enumerate(parts(variable))
        ]
        head = f"define internal {kind} @{self.name}({', '.join(given)}) nounwind {{"
        return "\n".join([head, *slots, *self._lines, f"ret {kind} {found}", "}"])

    # Lines

    def _labels(self, count: int) -> list[str]:
        self._count += count
        return [f"b{self._count - i}" for i in range(count)]

    def _label(self, label: str) -> None:
        self._lines.append(f"{label}:")

    def _jump(self, label: str) -> None:
        self._lines.append(f"br label %{label}")

    def _branch(self, test: ast.expr, then: str, other: str) -> None:
        truth = self._as(BOOL, self._value(test)).parts[0]
        self._lines.append(f"br i1 {truth}, label %{then}, label %{other}")

    def refused(self, what: str) -> RefusedError:
        where = f"{self._code.co_filename}:{self._at}: {self._code.co_name}"
        return RefusedError(f"{where} cannot be compiled: {what}")

    # Variables

    def _write(self, name: str, value: Value) -> None:
        """Give a variable a value; what it is may turn out to be more than it seemed."""
        before = self._variables.setdefault(name, value.type)
        kind = common(before, value.type)
        if kind is None:
            raise self.refused(f"{name} is {before} and {value.type}")
        if kind != before:
            self._variables[name], self._is_settled = kind, False
        for i, pair in enumerate(self._as(kind, value).pairs()):
            self._lines.append(f"store {pair}, ptr %{name}.{i}")

    def _read(self, name: str) -> Value:
        kind = self._variables[name]
        names = (self._new(f"load {part}, ptr %{name}.{i}") for i, part in enumerate(parts(kind)))
        return Value(kind, tuple(names))

    # Statements

    def _block(self, statements: Sequence[ast.stmt]) -> bool:
        """Whether it ends with a jump."""
        for statement in statements:
            self._at = statement.lineno
            if type(statement) not in _STATEMENTS:
                raise self.refused(f"{type(statement).__name__} is not known")
            if isinstance(statement, (ast.For, ast.While)) and statement.orelse:
                raise self.refused("a loop has no else")
            try:
                if _STATEMENTS[type(statement)](self, statement):
                    return True
            except RefusedError:
                raise
            except (AssertionError, LookupError, TypeError, ValueError) as error:
                raise self.refused(f"{ast.unparse(statement)}: {error!r}") from error
        return False

    def _expression(self, node: ast.Expr) -> None:
        if not isinstance(node.value, ast.Constant):  # a docstring
            self._value(node.value)

    def _assignment(self, node: ast.Assign) -> None:
        value = self._value(node.value)
        for target in node.targets:
            self._assign(target, value)

    def _assign(self, target: ast.expr, value: Value) -> None:
        if isinstance(target, ast.Name):
            self._write(target.id, value)
        elif isinstance(target, ast.Tuple):
            for entry, part in zip(target.elts, entries(value), strict=True):
                self._assign(entry, part)
        else:
            self._store(*self._place(target), value)

    def _augmented(self, node: ast.AugAssign) -> None:
        if isinstance(node.target, ast.Name):
            before = self._read(node.target.id)
            self._assign(node.target, self._computed(node.op, before, self._value(node.value)))
            return
        dtype, place = self._place(node.target)
        before = self._load(dtype, place)
        self._store(dtype, place, self._computed(node.op, before, self._value(node.value)))

    def _return(self, node: ast.Return) -> bool:
        self._write(_RESULT, NOTHING if node.value is None else self._value(node.value))
        self._jump("end")
        return True

    def _if(self, node: ast.If) -> bool:
        then, other, after = self._labels(3)
        self._branch(node.test, then, other)
        ends = []
        for label, statements in ((then, node.body), (other, node.orelse)):
            self._label(label)
            ends.append(self._block(statements))
            if not ends[-1]:
                self._jump(after)
        if all(ends):
            return True
        self._label(after)
        return False

    def _while(self, node: ast.While) -> None:
        test, body, after = self._labels(3)
        self._jump(test)
        self._label(test)
        self._branch(node.test, body, after)
        self._label(body)
        self._body(node.body, test, after)
        self._jump(test)
        self._label(after)

    def _body(self, statements: Sequence[ast.stmt], following: str, after: str) -> None:
        """What a loop does again and again; ends in a block of its own."""
        self._loops.append((following, after))
        if self._block(statements):
            self._label(*self._labels(1))  # nobody comes here
        self._loops.pop()

    def _for(self, node: ast.For) -> None:
        if isinstance(node.iter, ast.Tuple):
            return self._for_each(node, node.iter.elts)
        if not isinstance(node.iter, ast.Call) or self._static(node.iter.func) is not range:
            raise self.refused("a loop is over a range, or over a tuple that stands there")
        given = [self._whole_number(arg) for arg in node.iter.args]
        start, stop, step = (ZERO, *given, ONE) if len(given) == 1 else (*given, ONE)[:3]
        test, body, following, after = self._labels(4)
        counter = _temporary(node)
        self._write(counter, start)
        self._jump(test)
        self._label(test)
        at = self._read(counter)
        goes_back = (known(step) or 1) < 0
        goes_on = self._compared(ast.Gt() if goes_back else ast.Lt(), at, stop)
        self._lines.append(f"br i1 {goes_on.parts[0]}, label %{body}, label %{after}")
        self._label(body)
        self._assign(node.target, at)
        self._body(node.body, following, after)
        self._jump(following)
        self._label(following)
        self._write(counter, self._computed(ast.Add(), at, step))
        self._jump(test)
        self._label(after)
        return None

    def _for_each(self, node: ast.For, given: Sequence[ast.expr]) -> None:
        """The body again for each of them."""
        (after,) = self._labels(1)
        for value in [self._value(entry) for entry in given]:
            (following,) = self._labels(1)
            self._assign(node.target, value)
            self._body(node.body, following, after)
            self._jump(following)
            self._label(following)
        self._jump(after)
        self._label(after)

    def _break(self, node: ast.Break) -> bool:
        self._jump(self._loops[-1][1])
        return True

    def _continue(self, node: ast.Continue) -> bool:
        self._jump(self._loops[-1][0])
        return True

    # Fields and entries

    def _place(self, node: ast.expr) -> tuple[np.dtype[Any], str]:
        """What number or record is where."""
        if isinstance(node, ast.Attribute):
            outer = self._value(node.value)
            fields: Any = outer.type.dtype.fields if isinstance(outer.type, Record) else {}
            if node.attr in fields:
                dtype, offset = fields[node.attr][:2]
                (place,) = outer.parts
                return dtype, self._new(f"getelementptr inbounds i8, ptr {place}, i64 {offset}")
        if isinstance(node, ast.Subscript):
            outer = self._value(node.value)
            if isinstance(outer.type, Array):
                dtype, (place, *sizes) = outer.type.dtype, self._part(node, outer)
                if not sizes:
                    return dtype, place
        raise self.refused(f"{ast.unparse(node)} is no field or entry")

    def _part(self, node: ast.Subscript, array: Value) -> tuple[str, ...]:
        """Where a part of an array is, and its sizes."""
        place, *sizes = array.parts
        given = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        at = ZERO
        for axis, size in enumerate(Value(INT, (size,)) for size in sizes):
            at = self._computed(ast.Mult(), at, size) if axis else at
            if axis < len(given):
                at = self._computed(ast.Add(), at, self._index(given[axis], size))
        assert isinstance(array.type, Array)
        assert len(given) <= len(sizes), "an index too many"
        entry = f"[{array.type.dtype.itemsize} x i8]"
        found = self._new(f"getelementptr inbounds {entry}, ptr {place}, i64 {at.parts[0]}")
        return found, *sizes[len(given) :]

    def _index(self, node: ast.expr, size: Value) -> Value:
        """Below zero it counts from the end if it stands there as a number."""
        index = self._whole_number(node)
        return self._computed(ast.Add(), index, size) if (known(index) or 0) < 0 else index

    def _whole_number(self, node: ast.expr) -> Value:
        value = self._value(node)
        if value.type != INT:
            raise self.refused(f"{ast.unparse(node)} is no whole number")
        return value

    def _load(self, dtype: np.dtype[Any], place: str) -> Value:
        if dtype.names:
            return Value(Record(dtype), (place,))
        if dtype.subdtype:
            entry, sizes = dtype.subdtype
            return Value(Array(entry, len(sizes)), (place, *map(str, sizes)))
        stored, kind, (widen, _) = _STORED[dtype]
        found = self._new(f"load {stored}, ptr {place}")
        return (
            self._number(kind, f"{widen} {stored} {found} to {kind}")
            if widen
            else Value(kind, (found,))
        )

    def _store(self, dtype: np.dtype[Any], place: str, value: Value) -> None:
        if dtype.names and value.type == Record(dtype):
            given = f"ptr {place}, ptr {value.parts[0]}, i64 {dtype.itemsize}, i1 false"
            self._lines.append(f"call void @llvm.memcpy.p0.p0.i64({given})")
            return
        stored, kind, (_, narrow) = _STORED[dtype]
        (part,) = self._as(kind, value).parts
        if narrow:
            part = self._new(f"{narrow} {kind} {part} to {stored}")
        self._lines.append(f"store {stored} {part}, ptr {place}")

    # Expressions

    def _value(self, node: ast.expr) -> Value:
        if (static := constant(self._static(node))) is not None:
            return static
        if type(node) not in _EXPRESSIONS:
            raise self.refused(f"{ast.unparse(node)} is not known")
        return _EXPRESSIONS[type(node)](self, node)

    def _static(self, node: ast.expr) -> Any:
        """What an expression stands for whatever the arguments; None where nothing is known."""
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Name) and node.id not in self._code.co_varnames:
            return self._globals.get(node.id, getattr(builtins, node.id, None))
        if isinstance(node, ast.Attribute):
            return getattr(self._static(node.value), node.attr, None)
        return None

    def _name(self, node: ast.Name) -> Value:
        if node.id not in self._variables:
            raise self.refused(f"{node.id} is not known")
        return self._read(node.id)

    def _attribute(self, node: ast.Attribute) -> Value:
        outer = self._value(node.value)
        if isinstance(outer.type, Group) and node.attr in outer.type.names:
            return entries(outer)[outer.type.names.index(node.attr)]
        if isinstance(outer.type, Array) and node.attr == "shape":
            return grouped([Value(INT, (size,)) for size in outer.parts[1:]])
        return self._load(*self._place(node))

    def _subscript(self, node: ast.Subscript) -> Value:
        outer = self._value(node.value)
        if isinstance(outer.type, Group):
            return entries(outer)[int(ast.literal_eval(node.slice))]
        if not isinstance(outer.type, Array):
            raise self.refused(f"{ast.unparse(node.value)} has no entries")
        if isinstance(node.slice, ast.Slice):
            if node.slice.lower or node.slice.step or not node.slice.upper:
                raise self.refused("a slice is of the first entries")
            stop = self._index(node.slice.upper, Value(INT, outer.parts[1:2]))
            return Value(outer.type, (outer.parts[0], *stop.parts, *outer.parts[2:]))
        place, *sizes = self._part(node, outer)
        if sizes:
            return Value(Array(outer.type.dtype, len(sizes)), (place, *sizes))
        return self._load(outer.type.dtype, place)

    def _tuple(self, node: ast.Tuple) -> Value:
        return grouped([self._value(entry) for entry in node.elts])

    def _and_or(self, node: ast.BoolOp) -> Value:
        (after,) = self._labels(1)
        result = _temporary(node)
        for operand in node.values:
            value = self._value(operand)
            if value.type != BOOL:
                raise self.refused(f"{ast.unparse(operand)} is neither true nor false")
            self._go_on(result, value, after, isinstance(node.op, ast.And))
        self._jump(after)
        self._label(after)
        return self._read(result)

    def _go_on(self, result: str, value: Value, after: str, while_true: bool) -> None:
        """What comes later is looked at only where it matters."""
        self._write(result, value)
        (following,) = self._labels(1)
        ways = (following, after) if while_true else (after, following)
        self._lines.append(f"br i1 {value.parts[0]}, label %{ways[0]}, label %{ways[1]}")
        self._label(following)

    def _if_else(self, node: ast.IfExp) -> Value:
        then, other, after = self._labels(3)
        result = _temporary(node)
        self._branch(node.test, then, other)
        for label, expression in ((then, node.body), (other, node.orelse)):
            self._label(label)
            self._write(result, self._value(expression))
            self._jump(after)
        self._label(after)
        return self._read(result)

    def _unary(self, node: ast.UnaryOp) -> Value:
        value = self._value(node.operand)
        if isinstance(node.op, ast.Not):
            return self._number(BOOL, f"xor i1 {self._as(BOOL, value).parts[0]}, true")
        if isinstance(node.op, ast.Invert):
            return self._computed(ast.BitXor(), value, Value(INT, ("-1",)))
        if isinstance(node.op, ast.UAdd):
            return self._computed(ast.Sub(), value, ZERO)
        if value.type == FLOAT:
            return self._number(FLOAT, f"fneg double {value.parts[0]}")
        return self._computed(ast.Sub(), ZERO, value)

    def _binary(self, node: ast.BinOp) -> Value:
        return self._computed(node.op, self._value(node.left), self._value(node.right))

    def _compare(self, node: ast.Compare) -> Value:
        left, result = self._value(node.left), _temporary(node)
        (after,) = self._labels(1)
        for test, operand in zip(node.ops, node.comparators, strict=True):
            right = self._value(operand)
            value = self._compared(test, left, right)
            if len(node.ops) == 1:
                return value
            self._go_on(result, value, after, True)
            left = right
        self._jump(after)
        self._label(after)
        return self._read(result)

    # Calls

    def _call(self, node: ast.Call) -> Value:
        function, args = self._static(node.func), list[Value]()
        if node.keywords:
            raise self.refused(f"{ast.unparse(node)} is not known: arguments have no names")
        for arg in node.args:
            if isinstance(arg, ast.Starred):
                args += entries(self._value(arg.value))
            else:
                args.append(self._value(arg))
        if function in _BUILTINS:
            return _BUILTINS[function](self, *args)
        function = _REPLACED.get(function, getattr(function, "__wrapped__", function))
        names = getattr(function, "_fields", ())
        if isinstance(function, type) and issubclass(function, tuple) and len(names) == len(args):
            return grouped(args, names)
        if not isinstance(function, FunctionType):
            raise self.refused(f"{ast.unparse(node)} is not known")
        called = self._module.function(function, [value.type for value in args])
        kind = whole(called.returns)
        given = ", ".join(pair for value in args for pair in value.pairs())
        line = f"call {kind} @{called.name}({given})"
        count = len(parts(called.returns))
        if not count:
            self._lines.append(line)
            return NOTHING
        found = self._new(line)
        results = (self._new(f"extractvalue {kind} {found}, {i}") for i in range(count))
        return Value(called.returns, (found,) if count == 1 else tuple(results))

    def _len(self, array: Value) -> Value:
        if isinstance(array.type, Array):
            return Value(INT, array.parts[1:2])
        return Value(INT, (str(len(entries(array))),))


def _gcd(a: int, b: int) -> int:
    while b != 0:
        a, b = b, a % b
    return abs(a)


def _temporary(node: ast.stmt | ast.expr) -> str:
    """A variable of what stands there."""
    return f"at.{node.lineno}.{node.col_offset}.{type(node).__name__}"


# What functions may consist of.

_STATEMENTS: Mapping[type[ast.stmt], Callable[[_Function, Any], bool | None]] = {
    ast.Assign: _Function._assignment,
    ast.AugAssign: _Function._augmented,
    ast.Break: _Function._break,
    ast.Continue: _Function._continue,
    ast.Expr: _Function._expression,
    ast.For: _Function._for,
    ast.If: _Function._if,
    ast.Return: _Function._return,
    ast.While: _Function._while,
}

_EXPRESSIONS: Mapping[type[ast.expr], Callable[[_Function, Any], Value]] = {
    ast.Attribute: _Function._attribute,
    ast.BinOp: _Function._binary,
    ast.BoolOp: _Function._and_or,
    ast.Call: _Function._call,
    ast.Compare: _Function._compare,
    ast.IfExp: _Function._if_else,
    ast.Name: _Function._name,
    ast.Subscript: _Function._subscript,
    ast.Tuple: _Function._tuple,
    ast.UnaryOp: _Function._unary,
}

_BUILTINS: Mapping[Any, Callable[..., Value]] = {
    abs: _Function._abs,
    bool: _Function._bool,
    float: _Function._float,
    int: _Function._int,
    len: _Function._len,
    max: _Function._max,
    min: _Function._min,
    np.maximum: _Function._max,
    np.minimum: _Function._min,
    round: _Function._round,
}

_REPLACED: Mapping[Any, Callable[..., Any]] = {math.gcd: _gcd}

_STORED: Mapping[np.dtype[Any], tuple[str, Number, tuple[str, str]]] = {
    np.dtype("f8"): ("double", FLOAT, ("", "")),
    np.dtype("i8"): ("i64", INT, ("", "")),
    np.dtype("i4"): ("i32", INT, ("sext", "trunc")),
    np.dtype("b1"): ("i8", BOOL, ("trunc", "zext")),
}
"""Numbers of arrays as they are stored, as they are computed with, and the way there and back."""
