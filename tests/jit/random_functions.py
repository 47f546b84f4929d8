"""Random functions of the part of Python that is compiled, as text.

Numbers stay so small that sums and products of them are exact, nothing is divided by zero and no
index is beyond its array: what is compiled does then what Python does. Truth values are those of
Python: numpy's are no numbers, ``gcd`` and ``round`` refuse them.
"""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np

POINT = np.dtype([("x", np.float64), ("count", np.int64), ("many", np.int64, (2,))], align=True)

HEAD = """\
from __future__ import annotations
import math
from math import gcd
from typing import NamedTuple
import numpy as np

class Pair(NamedTuple):
    low: float
    high: float

class Tables(NamedTuple):
    whole: object
    points: object

HALF, MANY = 0.5, 7
"""

ARGUMENTS = "i, j, x, y, b, tables, small, reals, flags"


def arguments(module: Any, value: int) -> tuple[Any, ...]:
    """Numbers, tables of whole numbers and records, small numbers of three dimensions, floats of
    two, truth values: made of a number.
    """
    points = np.zeros(3, POINT).view(np.recarray)
    points.x, points.count, points.many = value / 7, [1, value, -3], value % 5
    tables = module.Tables(np.arange(4) * value % 11 - 5, points)
    small = ((np.arange(8) - value) % 9).astype(np.int32).reshape(2, 2, 2)
    reals = np.arange(6.0).reshape(2, 3) / (abs(value) + 1) - 1
    flags = np.arange(3) % 2 == value % 2
    numbers = value % 23 - 11, -value, value / 3 - 4, -value * 1.25, value % 2 == 0
    return *numbers, tables, small, reals, flags


class Writer:
    """Writes functions: ``n`` are whole numbers, ``m`` whole numbers that may become floats, ``t``
    truth values. Whatever is kept is between -50 and 50.
    """

    def __init__(self, random: Random) -> None:
        self._any = random
        self._lines: list[str] = []
        self._loops = 0
        self._arrays = True

    def text(self) -> str:
        """A module whose ``run`` calls ``helper`` and ``pair``."""
        self._lines = [HEAD]
        self._arrays = False
        self._function("helper", "i, j, x, y, b", "m0 + 0.5", calls=False)
        self._lines += ["def pair(x, y):\n    return Pair(x / 3 + y, 2 * y - x)\n"]
        self._arrays = True
        result = self._any.choice(["int", "float", "bool"])
        final = {"int": "n0 + n1 * t0", "float": "m0 + m1 + n0 + 0.5", "bool": "n0 > m0 or t0"}[
            result
        ]
        self._function("run", ARGUMENTS, final, calls=True, result=result)
        return "\n".join(self._lines)

    def _function(
        self, name: str, arguments: str, final: str, *, calls: bool, result: str = "float"
    ) -> None:
        self._calls, self._result = calls, result
        self._lines += [f"def {name}({arguments}) -> {result}:"]
        self._lines += ["    n0, n1, n2 = i, j, 3", "    m0 = m1 = 1", "    t0, t1 = b, False"]
        if self._arrays:
            self._lines += ["    row, some, point = reals[-1], tables.whole[:2], tables.points[0]"]
        self._block(1, 3 + 3 * calls)
        self._lines += [f"    return {final}", ""]

    def _line(self, depth: int, text: str) -> None:
        self._lines.append("    " * depth + text)

    def _block(self, depth: int, most: int, *, in_loop: bool = False) -> None:
        for _ in range(self._any.randint(1, most)):
            kinds = [self._assignment] * 5
            if depth < 4:
                kinds += [self._if, self._for, self._while, self._each]
            self._any.choice(kinds)(depth)
        if in_loop and self._any.random() < 0.5:
            self._line(depth, f"if {self._truth(2)}:")
            self._line(depth + 1, self._any.choice(["break", "continue"]))

    # Statements

    def _if(self, depth: int) -> None:
        self._line(depth, f"if {self._truth(2)}:")
        self._block(depth + 1, 2)
        way = self._any.randint(0, 3)
        if way == 1:
            returned = {
                "int": self._whole(1),
                "float": f"{self._real(1)} + 0.5",
                "bool": self._truth(1),
            }
            self._line(depth + 1, f"return {returned[self._result]}")
        if way > 1:
            self._line(depth, "else:" if way == 2 else f"elif {self._truth(1)}:")
            self._block(depth + 1, 2)

    def _for(self, depth: int) -> None:
        up = f"{self._small()}, {self._small()}"
        steps = f"range({self._small()})", f"range({up})", f"range({up}, 2)", f"range({up}, -1)"
        self._line(depth, f"for n2 in {self._any.choice(steps)}:")
        self._block(depth + 1, 2, in_loop=True)

    def _each(self, depth: int) -> None:
        self._line(depth, f"for m1 in ({self._whole(1)}, {self._real(1)}):")
        self._line(depth + 1, "m1 = max(min(m1, 50), -50)")
        self._block(depth + 1, 2, in_loop=True)

    def _while(self, depth: int) -> None:
        self._loops += 1
        count = f"w{self._loops}"
        self._line(depth, f"{count} = 0")
        test = self._any.choice(["True", self._truth(1), f"{count} < {self._small()}"])
        self._line(depth, f"while {test}:")
        self._line(depth + 1, f"{count} += 1")
        self._line(depth + 1, f"if {count} > 3:")
        self._line(depth + 2, "break")
        self._block(depth + 1, 2, in_loop=True)

    def _assignment(self, depth: int) -> None:
        whole, real = self._kept_whole(), self._kept_real()
        n, m = self._any.choice(["n0", "n1"]), self._any.choice(["m0", "m1"])
        lines = [
            *(f"{n} = {whole}", f"{m} = {real}", f"{m} = {whole}", f"t0 = bool({self._truth(2)})"),
            *("n0, n1 = n1, n0", f"(n0, m0), t1 = ({whole}, {real}), bool({self._truth(1)})"),
            f"n1 += {self._small()}\n{'    ' * depth}n1 %= 31",
        ]
        if self._arrays:
            at = self._small()
            lines += [
                f"tables.whole[{at}] = {self._any.choice([whole, real])}",
                f"small[{at} % 2, {self._small()} % 2, -1] = {whole}",
                f"reals[{at} % 2, {at} % 3] = {real}",
                f"flags[{at} % 3] = {self._truth(1)}",
                f"tables.points[{at} % 3].x = point.count = {whole}",
                f"point.many[{at} % 2] += {self._small()}",
                f"row[{at} % 3] = point.x = {real}",
                f"tables.points[{at} % 3] = tables.points[{self._small()} % 3]",
                f"row, point = reals[{at} % 2], tables.points[{at} % 3]",
                f"some = tables.whole[: {at} % 4 + 1]",
                *("point.many[0] %= 17", "point.many[1] %= 17"),
            ]
        if self._calls:
            lines += [
                f"m0, m1 = pair({real}, m0)\n{'    ' * depth}m0, m1 = m0 / 9, m1 / 9",
                f"m0 = pair(*(x, {real})).{self._any.choice(['low', 'high'])} / 9",
            ]
        self._line(depth, self._any.choice(lines))

    # Expressions

    def _kept_whole(self) -> str:
        return f"({self._whole(2)}) % {self._any.choice([31, -50, 7])}"

    def _kept_real(self) -> str:
        return f"max(min({self._real(2)}, 50{self._any.choice(['', '.0'])}), -50)"

    def _small(self) -> str:
        return f"({self._whole(1)}) % 4"

    def _whole(self, depth: int) -> str:
        ends = ["n0", "n1", "n2", "i", "j", "t0", "MANY", "-3", "2", "True"]
        if self._arrays:
            ends += ["int(tables.whole[-1])", "int(small[1, 0, n0 % 2])", "len(some)", "len(flags)"]
            ends += [
                "int(point.count)",
                "int(point.many[n1 % 2])",
                "reals.shape[1]",
                "int(some[0])",
            ]
        if depth <= 0:
            return self._any.choice(ends)
        a, b = self._whole(depth - 1), self._whole(depth - 1)
        return self._any.choice(
            [
                *(f"({a} + {b})", f"({a} - {b})", f"({a} * {b})", f"-{a}", f"+{a}", f"~{a}"),
                *(f"({a} // (2 * {b} + 1))", f"({a} % (2 * {b} - 1))", f"({a} >> 1)", f"abs({a})"),
                *(f"max({a}, {b})", f"min(({a}, {b}, 4))", f"gcd({a}, {b})", f"int({a})"),
                *(f"({a} if {self._truth(depth - 1)} else {b})", f"({a}, {b})[-1]"),
                *(f"int({self._real(depth - 1)})", f"round({self._real(depth - 1)})", a),
            ]
        )

    def _real(self, depth: int) -> str:
        ends = ["x", "y", "m0", "m1", "n0", "HALF", "-0.75", "t1"]
        if self._arrays:
            ends += ["float(row[n0 % 3])", "float(reals[0, n1 % 3])", "float(point.x)"]
            ends += ["float(tables.points[n0 % 3].x)", "float(tables.points[-1].count)"]
        if self._calls:
            ends += ["helper(n0, n1, x, m0, t0) / 9", "helper(j, n2, n0, y, b) / 9"]
        if depth <= 0:
            return self._any.choice(ends)
        a, b = self._real(depth - 1), self._real(depth - 1)
        return self._any.choice(
            [
                *(f"({a} + {b})", f"({a} - {b})", f"({a} * {b})", f"{a} / (abs({b}) + 1)"),
                *(f"-{a}", f"abs({a})", f"max({a}, {b})", f"min({a}, {b}, n0)", f"+{a}"),
                *(f"{a} // (abs({b}) + HALF)", f"{a} // -(abs({b}) + 1.5)", f"float({a})"),
                *(f"({a} if {self._truth(depth - 1)} else {b})", self._whole(depth - 1)),
                *(f"np.maximum({a}, {b} + 0)", f"np.minimum({a}, {b} + 0)", f"pair({a}, {b})[0]"),
            ][: None if self._calls else -1]
        )

    def _truth(self, depth: int) -> str:
        ends = ["t0", "t1", "b", "n0 > 1", "m0 < x", "bool(n1)", "bool(x)", "False"]
        if self._arrays:
            ends += ["bool(flags[n0 % 3])", "bool(flags[-1])"]
        if depth <= 0:
            return self._any.choice(ends)
        a, b = self._truth(depth - 1), self._truth(depth - 1)
        more = self._any.choice([self._whole, self._real])
        p, q, r = (more(depth - 1) for _ in range(3))
        signs = [self._any.choice(["<", "<=", ">", ">=", "==", "!="]) for _ in range(2)]
        return self._any.choice(
            [
                *(f"({a} and {b})", f"({a} or {b})", f"not {a}", f"({a} and {b} or t1)"),
                *(f"({p} {signs[0]} {q})", f"({p} {signs[0]} {q} {signs[1]} {r})"),
                f"({a} if {b} else t0)",
            ]
        )
