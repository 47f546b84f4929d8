"""Arithmetic of compiled functions: lines of LLVM's language that compute with values.

What it does where Python's numbers and LLVM's differ, ``compiler`` says.
"""

from __future__ import annotations

import ast
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from anabranch.jit.values import (
    BOOL,
    FLOAT,
    INT,
    ONE,
    ZERO,
    Group,
    Number,
    Type,
    Value,
    constant,
    entries,
    grouped,
    known,
)


class RefusedError(TypeError):
    """What a function does is not known here."""


class Arithmetic(ABC):
    """A function so far: its lines, to which every computation adds some."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._count = 0

    @abstractmethod
    def refused(self, what: str) -> RefusedError:
        """An error that says where in the function this is."""

    def _new(self, line: str) -> str:
        """LLVM's name of what a line results in."""
        self._count += 1
        name = f"%t{self._count}"
        self._lines.append(f"{name} = {line}")
        return name

    def _number(self, kind: Number, line: str) -> Value:
        return Value(kind, (self._new(line),))

    def _as(self, kind: Type, value: Value) -> Value:
        """A value taken for another type."""
        if value.type == kind:
            return value
        if isinstance(kind, Group):
            pairs = zip(kind.entries, entries(value), strict=True)
            return grouped([self._as(*pair) for pair in pairs], kind.names)
        if not isinstance(kind, Number) or (value.type, kind) not in _CASTS:
            raise self.refused(f"{value.type} is not {kind}")
        (part,) = value.parts
        if kind == FLOAT and (number := known(value)) is not None:
            return constant(float(number)) or value
        cast = _CASTS[value.type, kind]
        return self._number(kind, cast.format(part))

    def _computed(self, operator: ast.operator, left: Value, right: Value) -> Value:
        floats = FLOAT in (left.type, right.type) or isinstance(operator, ast.Div)
        kind = FLOAT if floats else INT
        a, b = self._as(kind, left), self._as(kind, right)
        x, y, fold = known(a), known(b), _KNOWN.get(type(operator))
        if fold and x is not None and y is not None and (result := constant(fold(x, y))):
            return result
        if name := _OPERATORS[kind].get(type(operator)):
            return self._number(kind, f"{name} {kind} {a.parts[0]}, {b.parts[0]}")
        if isinstance(operator, ast.FloorDiv) and floats:
            return self._floor(a, b)
        if isinstance(operator, (ast.FloorDiv, ast.Mod)) and not floats:
            quotient, rest = self._divided(a, b)
            return quotient if isinstance(operator, ast.FloorDiv) else rest
        raise self.refused(f"{type(operator).__name__} of {kind} is not known")

    def _divided(self, a: Value, b: Value) -> tuple[Value, Value]:
        """The quotient of whole numbers, rounded down, and the rest; LLVM leaves out what nobody
        reads, and the processor would stop at a division by zero.
        """
        is_zero = self._compared(ast.Eq(), b, ZERO)
        by = self._select(is_zero, ONE, b)
        quotient = self._number(INT, f"sdiv i64 {a.parts[0]}, {by.parts[0]}")
        rest = self._number(INT, f"srem i64 {a.parts[0]}, {by.parts[0]}")
        signs = self._number(INT, f"xor i64 {rest.parts[0]}, {by.parts[0]}")
        differ = self._compared(ast.Lt(), signs, ZERO).parts[0]
        is_rest = self._compared(ast.NotEq(), rest, ZERO).parts[0]
        is_above = self._number(BOOL, f"and i1 {differ}, {is_rest}")
        quotient = self._computed(ast.Sub(), quotient, is_above)
        rest = self._select(is_above, self._computed(ast.Add(), rest, by), rest)
        return self._select(is_zero, ZERO, quotient), rest

    def _floor(self, a: Value, b: Value) -> Value:
        """The quotient of floats, rounded down: as Python has it, of all but the rest."""
        rest = self._number(FLOAT, f"frem double {a.parts[0]}, {b.parts[0]}")
        quotient = self._computed(ast.Div(), self._computed(ast.Sub(), a, rest), b)
        is_above = self._compared(ast.Lt(), self._computed(ast.Mult(), rest, b), ZERO)
        return self._rounded(self._computed(ast.Sub(), quotient, is_above))

    def _rounded(self, value: Value) -> Value:
        return self._number(FLOAT, f"call double @llvm.rint.f64(double {value.parts[0]})")

    def _compared(self, operator: ast.cmpop, left: Value, right: Value) -> Value:
        if type(operator) not in _COMPARISONS:
            raise self.refused(f"{type(operator).__name__} is not known")
        kind = FLOAT if FLOAT in (left.type, right.type) else INT
        (a,), (b,) = self._as(kind, left).parts, self._as(kind, right).parts
        test = _COMPARISONS[type(operator)]
        if kind == FLOAT:
            test = f"fcmp {'u' if test == 'ne' else 'o'}{test}"
        else:
            test = f"icmp {test}" if test in ("eq", "ne") else f"icmp s{test}"
        return self._number(BOOL, f"{test} {kind} {a}, {b}")

    def _select(self, truth: Value, then: Value, other: Value) -> Value:
        ((a,), (b,)), (is_true,) = (list(then.pairs()), list(other.pairs())), truth.parts
        return Value(then.type, (self._new(f"select i1 {is_true}, {a}, {b}"),))

    def _most(self, operator: ast.cmpop, args: Sequence[Value]) -> Value:
        """The first of the greatest, or of the least."""
        args = entries(args[0]) if len(args) == 1 else args
        kind = FLOAT if any(arg.type == FLOAT for arg in args) else INT
        best, *others = (self._as(kind, arg) for arg in args)
        for other in others:
            best = self._select(self._compared(operator, other, best), other, best)
        return best

    def _max(self, *args: Value) -> Value:
        return self._most(ast.Gt(), args)

    def _min(self, *args: Value) -> Value:
        return self._most(ast.Lt(), args)

    def _abs(self, value: Value) -> Value:
        if value.type == FLOAT:
            return self._number(FLOAT, f"call double @llvm.fabs.f64(double {value.parts[0]})")
        return self._max(value, self._computed(ast.Sub(), ZERO, value))

    def _round(self, value: Value) -> Value:
        return self._int(self._rounded(self._float(value)))

    def _int(self, value: Value) -> Value:
        return self._as(INT, value)

    def _float(self, value: Value) -> Value:
        return self._as(FLOAT, value)

    def _bool(self, value: Value) -> Value:
        return self._as(BOOL, value)


_OPERATORS: Mapping[Number, Mapping[type[ast.operator], str]] = {
    INT: {ast.Add: "add", ast.BitXor: "xor", ast.Mult: "mul", ast.RShift: "ashr", ast.Sub: "sub"},
    FLOAT: {ast.Add: "fadd", ast.Div: "fdiv", ast.Mult: "fmul", ast.Sub: "fsub"},
}

_KNOWN: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}

_COMPARISONS: Mapping[type[ast.cmpop], str] = {
    ast.Eq: "eq",
    ast.NotEq: "ne",
    ast.Lt: "lt",
    ast.LtE: "le",
    ast.Gt: "gt",
    ast.GtE: "ge",
}

_CASTS: Mapping[tuple[Any, Number], str] = {
    (BOOL, INT): "zext i1 {} to i64",
    (BOOL, FLOAT): "uitofp i1 {} to double",
    (INT, FLOAT): "sitofp i64 {} to double",
    (INT, BOOL): "icmp ne i64 {}, 0",
    (FLOAT, INT): "call i64 @llvm.fptosi.sat.i64.f64(double {})",
    (FLOAT, BOOL): "fcmp une double {}, 0.0",
}
