"""What a page says in words and numbers: figures and tables, ready for people."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure for people.

    Attributes:
        more: what else there is to say; may be empty.
    """

    name: str
    value: str
    more: str = ""

    @property
    def line(self) -> str:
        """Value and the rest in one line."""
        return f"{self.value}{', ' if self.more else ''}{self.more}"


@dataclass(frozen=True, slots=True)
class Table:
    """A table under a heading of its own.

    Attributes:
        columns: headings; the first column is text, and so are those that have words.
        rows: one at least.
        said: a sentence below it.
    """

    heading: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    said: str = ""


def spent(parts: Sequence[tuple[str, float, str]]) -> Table:
    """What the predicted step is spent on: names, seconds and remarks of its parts."""
    whole = sum(seconds for _, seconds, _ in parts)
    rows = [
        (name, ms(seconds), f"{seconds / whole if whole else 0.0:.1%}", remark)
        for name, seconds, remark in parts
    ]
    return Table(
        "Where the predicted step goes",
        ("part", "ms", "of the step", ""),
        [*rows, ("together", ms(whole), "100.0%", "")],
        "The parts are those of the device that computes most; they add up to the step.",
    )


def ms(seconds: float) -> str:
    """Milliseconds in a column of them."""
    return f"{seconds * 1e3:.2f}"
