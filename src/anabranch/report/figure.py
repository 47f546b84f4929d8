"""Figures and tables of text on a page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Figure:
    """A named value as text.

    Attributes:
        more: further text in small print; may be empty.
    """

    name: str
    value: str
    more: str = ""

    @property
    def line(self) -> str:
        """Value and further text in one line."""
        return f"{self.value}{', ' if self.more else ''}{self.more}"


@dataclass(frozen=True, slots=True)
class ReportTable:
    """A table with a heading.

    Attributes:
        columns: column headings; the first column and those with words are aligned left.
        rows: at least one row of cells.
        said: a sentence below the table.
    """

    heading: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    said: str = ""


def spent(parts: Sequence[tuple[str, float, str]], step_s: float) -> ReportTable:
    """Return a table of the parts of a predicted step: name, seconds, share and remark."""
    rows = [
        (name, ms(seconds), f"{seconds / step_s if step_s else 0.0:.1%}", remark)
        for name, seconds, remark in parts
    ]
    return ReportTable(
        "Where the predicted step goes",
        ("part", "ms", "of the step", ""),
        [*rows, ("together", ms(step_s), "100.0%", "")],
        "The parts are those of the critical path: what the end of the step waited for.",
    )


def ms(seconds: float) -> str:
    """Format seconds as milliseconds for a column."""
    return f"{seconds * 1e3:.2f}"
