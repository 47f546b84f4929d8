"""Compiled functions do what Python does, and all else is refused."""

from __future__ import annotations

import math
import sys
from random import Random
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st

from anabranch.jit.entries import _Call, _kind, _loaded, object_code
from tests.jit.random_functions import Writer, arguments

LIMIT = 1.5
POINT = np.dtype([("x", np.float64), ("count", np.int64)], align=True)


class Tables(NamedTuple):
    points: Any
    numbers: Any


class Pair(NamedTuple):
    low: float
    high: float


def compiled(function, *args):
    """The result of machine code."""
    return _with_code(function, args)(*args)


def _with_code(function, example):
    """The same function as machine code."""
    kinds, returns = tuple(map(_kind, example)), function.__annotations__["return"]
    code = _loaded(object_code(function, kinds, returns), kinds, returns)

    def call(*args):
        made = _Call(function, kinds, args)
        return code(made._place, *(arg for arg in args if isinstance(arg, (int, float))))

    return call


def agree(function, *examples):
    """One machine code for all of them, which are numbers."""
    code = _with_code(function, examples[0])
    for example in examples:
        assert code(*example) == function(*example), example


def whole(a: int, b: int, c: int) -> int:
    total = -a + b * c - (a >> 1) + ~b + abs(c) + max(a, b, c) - min((a, c)) + math.gcd(14, 21)
    if b != 0:
        total += a // b * 3 + a % b
    total -= a // 7 + c % -5
    return total if a <= b < c or not (a == c and b > 0) else total * True


def real(x: float, y: float, n: int) -> float:
    total = x / (abs(y) + LIMIT) - float(n) + round(x) + int(y) + np.maximum(x, n) * (y > 0)
    total += x // (abs(y) + 1) + min(x, y)
    return -total if math.inf > total > -np.inf and bool(n) else total


@given(st.lists(st.tuples(*[st.integers(-50, 50)] * 3), min_size=20))
def test_whole_numbers(examples):
    agree(whole, *examples)


@given(
    st.lists(st.tuples(st.floats(-1e9, 1e9), st.floats(-1e9, 1e9), st.integers(-9, 9)), min_size=20)
)
def test_floats(examples):
    """To the last bit."""
    agree(real, *examples)


@pytest.fixture(scope="module")
def module(tmp_path_factory):
    """A module that is written and executed anew for each text."""
    path = tmp_path_factory.mktemp("random")

    def execute(text):
        count = len(list(path.iterdir()))
        file = path / f"random_{count}.py"
        file.write_text(text)
        made = sys.modules[file.stem] = ModuleType(file.stem)
        exec(compile(text, file, "exec"), made.__dict__)
        return made

    yield execute
    for file in path.iterdir():
        del sys.modules[file.stem]


def contents(array):
    """Bits of what an array holds, 0 and -0 alike."""
    if array.dtype.names is None:
        return (array + 0).tobytes()
    return [contents(array[name]) for name in array.dtype.names]


@settings(max_examples=25)
@given(st.integers(0, 1 << 32))
def test_random_functions(module, seed):
    """Result and arrays are to the last bit those of plain Python, but for signs of 0."""
    text = Writer(Random(seed)).text()
    note(text)
    made = module(text)
    code = _with_code(made.run, arguments(made, 0))
    for value in (3, -8, 17):
        found = []
        for call in (code, made.run):
            given = arguments(made, value)
            result = float(call(*given)) + 0
            found.append((result, *map(contents, (*given[-4], *given[-3:]))))
        assert found[0] == found[1], value


def divided(a: int, b: int) -> int:
    return a // b + a % b


def test_a_division_by_zero_does_not_end_the_process():
    assert compiled(divided, 5, 0) == 0


def primes(most: int, last: bool) -> int:
    """Loops of both kinds, with all ways out of them."""
    found = 0
    for number in range(2, most):
        divisor = 2
        while True:
            if divisor * divisor > number:
                found = found + 1 if not last else number
                break
            if number % divisor == 0:
                break
            divisor += 1
        if number < 10:
            continue
        for _ in range(most, most - 3, -2):
            found += 10000 * (number == 11)
    for more in (found, 1.5):
        if more > 1e9:
            break
        found += int(more > 1)
    return found


def test_loops_and_conditions():
    agree(primes, (30, False), (100, True), (2, False))


def scaled(pair: Pair, by: float = 2.0) -> Pair:
    if by < 0:
        return Pair(pair.high * by, pair.low * by)
    return Pair(pair.low * by, pair.high * by)


def grown(value: int) -> float:
    """A whole number at first, and then a float: it is a float all along."""
    total = value
    for _ in range(3):
        total = total / 2 + 1
    return total


def tables(given: Tables, rows: Any, flags: Any, at: int) -> float:
    """Fields, entries, parts of arrays, and tuples of results."""
    points, count = given.points, len(given.points)
    first, last = points[0], points[-1]
    first.x = last.x = 2.5
    first.count += rows[at, 1]
    points[1] = first
    row = rows[at]
    row[0] = rows.shape[1] + len(points[: count - 1])
    flags[at] = not flags[at]
    pair = scaled(Pair(first.x, grown(row[0])), -1.0 if flags[at] else 3.0)
    low, high = pair
    given.numbers[at] = low + (pair.high if high > 0 else at)
    return scaled(*(pair, 2.0)).low + given.numbers[at]


def test_tables_of_records_and_numbers():
    results = []
    for call in (compiled, lambda function, *args: function(*args)):
        points = np.zeros(3, POINT).view(np.recarray)
        rows = np.arange(6, dtype=np.int32).reshape(3, 2)
        arrays = Tables(points, np.zeros(3)), rows, np.array([True, False, False])
        found = [call(tables, *arrays, 1), call(tables, *arrays, 2)]
        results.append((found, points.tolist(), rows.tolist(), arrays[2].tolist()))
    assert results[0] == results[1]


def counts(a: int) -> int:
    return counts(a - 1)


def listed(a: int) -> int:
    return len([a])


def either(a: int, b: int) -> int:
    return a or b


def named(a: int) -> int:
    return max(a, key=0)


def mixed(a: int) -> int:
    a = (a, a)
    return a[0]


def unknown(a: int) -> int:
    return a + missing  # noqa: F821


def halves(a: int) -> int:
    return a / 2


def sometimes(a: int) -> int:  # noqa: RET503
    if a > 1:
        return a


def searched(a: int) -> int:
    for _ in range(a):
        break
    else:
        a = 5
    return a


def at_a_half(a: int) -> int:
    return (a, 2)[a / 2]


def upside_down(a: int) -> int:
    return ~(a / 2)


def up_to_a_half(a: int) -> int:
    for _ in range(a / 2):
        a += 1
    return a


def by_name(a: int) -> int:
    return Pair(a, high=a).low


def nested(a: int) -> int:
    return tuple((a, a))[0]  # noqa: C409, RUF015


def digits(a: int) -> int:
    return round(a / 3, 2)


def huge(a: int) -> int:
    return a + 9223372036854775808


def lengths(a: int) -> int:
    b = (a,) if a > 1 else (a, a)
    return b[0]


@pytest.mark.parametrize(
    ("function", "line", "reason"),
    [
        (counts, 1, "it calls itself"),
        (listed, 1, r"\[a\] is not known"),
        (either, 1, "a is neither true nor false"),
        (named, 1, "is not known"),
        (mixed, 1, "a is i64 and Group"),
        (unknown, 1, "missing is not known"),
        (halves, 1, "it returns double, not i64"),
        (sometimes, 2, "return is i64 and Group"),
        (searched, 1, "a loop has no else"),
        (at_a_half, 1, "a / 2"),
        (upside_down, 1, "BitXor of double is not known"),
        (up_to_a_half, 1, "a / 2 is no whole number"),
        (by_name, 1, "arguments have no names"),
        (nested, 1, r"tuple\(\(a, a\)\) is not known"),
        (digits, 1, r"return round\(a / 3, 2\)"),
        (huge, 1, "9223372036854775808 is not known"),
        (lengths, 1, "is Group"),
    ],
)
def test_what_is_not_known_is_refused(function, line, reason):
    """With the line: what Python does there is nowhere guessed."""
    place = f"{function.__code__.co_filename}:{function.__code__.co_firstlineno + line}: "
    with pytest.raises(TypeError, match=reason) as error:
        compiled(function, *range(function.__code__.co_argcount))
    assert str(error.value).startswith(place)
