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
        columns: headings; the first column is text, the last may be, the others are numbers.
        said: a sentence below it.
    """

    heading: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    said: str = ""
