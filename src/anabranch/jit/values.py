"""What compiled functions compute with, and what LLVM calls it.

Numbers are whole ones of 64 bits, floats, and truth values. Records, arrays and tuples are only
where something is: a value consists of parts, each of which LLVM knows as one number or place.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

INT, FLOAT, BOOL, PLACE = "i64", "double", "i1", "ptr"

Number = str
"""One of the first three: names that LLVM has for them."""


class Record(NamedTuple):
    """A record: its place."""

    dtype: np.dtype[Any]


class Array(NamedTuple):
    """An array in C order: the place of its first entry, and its sizes."""

    dtype: np.dtype[Any]
    dimensions: int


class Group(NamedTuple):
    """A tuple: the parts of its entries, which may have names."""

    entries: tuple[Any, ...]
    names: tuple[str, ...] = ()


Type = Number | Record | Array | Group


class Value(NamedTuple):
    """A type, and LLVM's name of each part."""

    type: Type
    parts: tuple[str, ...]

    def pairs(self) -> Iterator[str]:
        """Every part with its type, as arguments of a call."""
        return (f"{kind} {part}" for kind, part in zip(parts(self.type), self.parts, strict=True))


NOTHING = Value(Group(()), ())

ZERO, ONE = Value(INT, ("0",)), Value(INT, ("1",))


def parts(kind: Type) -> list[str]:
    """LLVM's types of the parts."""
    if isinstance(kind, Number):
        return [kind]
    if isinstance(kind, Record):
        return [PLACE]
    if isinstance(kind, Array):
        return [PLACE, *[INT] * kind.dimensions]
    return [part for entry in kind.entries for part in parts(entry)]


def whole(kind: Type) -> str:
    """LLVM's type of a result."""
    found = parts(kind)
    return "void" if not found else found[0] if len(found) == 1 else f"{{{', '.join(found)}}}"


def constant(value: Any) -> Value | None:
    """A number that is known, if it is one."""
    if isinstance(value, bool):
        return Value(BOOL, (str(value).lower(),))
    if isinstance(value, int) and -(1 << 63) <= value < 1 << 63:
        return Value(INT, (str(int(value)),))
    if isinstance(value, float):
        return Value(FLOAT, (f"0x{struct.pack('>d', value).hex().upper()}",))
    return None


def known(value: Value) -> int | None:
    """The whole number that this is, where that is known."""
    is_known = value.type == INT and not value.parts[0].startswith("%")
    return int(value.parts[0]) if is_known else None


def grouped(entries: Sequence[Value], names: tuple[str, ...] = ()) -> Value:
    """A tuple of values."""
    kinds = tuple(entry.type for entry in entries)
    return Value(Group(kinds, names), tuple(part for entry in entries for part in entry.parts))


def entries(value: Value) -> list[Value]:
    """The values in a tuple."""
    assert isinstance(value.type, Group), f"{value.type} is no tuple"
    found, at = [], 0
    for kind in value.type.entries:
        count = len(parts(kind))
        found.append(Value(kind, value.parts[at : at + count]))
        at += count
    return found


def common(one: Type, other: Type) -> Type | None:
    """What values of both types can be taken for, if there is something."""
    if one == other:
        return one
    if isinstance(one, Number) and isinstance(other, Number):
        return FLOAT if FLOAT in (one, other) else INT
    if isinstance(one, Group) and isinstance(other, Group) and one.names == other.names:
        found = tuple(map(common, one.entries, other.entries))
        if len(one.entries) == len(other.entries) and None not in found:
            return Group(found, one.names)
    return None
