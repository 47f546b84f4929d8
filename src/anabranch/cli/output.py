"""Output of the verbs: one JSON document, or lines and tables for people, and warnings."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import typer


def print_json(document: Mapping[str, Any]) -> None:
    """Print one JSON document on standard output."""
    sys.stdout.write(json.dumps(document, indent=2, allow_nan=False) + "\n")


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table; the first column is text and may wrap, the others are figures."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for i, column in enumerate(columns):
        justify: Literal["left", "right"] = "right" if i else "left"
        table.add_column(column, justify=justify, vertical="bottom", overflow="fold", no_wrap=i > 0)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    # Wide tables stay whole in a file or a pipe.
    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    console.print(Text(title, "italic"), no_wrap=True, overflow="ellipsis")
    console.print(table)


def print_rows(rows: Sequence[tuple[str, str]]) -> None:
    """Print names with what is said of them, wrapped beside the names, not below them."""
    from textwrap import wrap

    room = _columns()
    beside = min(22, room // 3)
    for name, text in rows:
        lines = wrap(text, max(room - beside - 3, 16)) or [""]
        if len(name) > beside:
            lines = ["", *lines]
        for i, line in enumerate(lines):
            sys.stdout.write(f"  {'' if i else name:{beside}s} {line}".rstrip() + "\n")


def _columns() -> int:
    """Characters of a line: the terminal's; without one, those of ``COLUMNS``, or 80."""
    from shutil import get_terminal_size

    return get_terminal_size((80, 24)).columns


class Warnings:
    """Shows each warning once, as a paragraph on standard error, as ``warnings.showwarning``."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def __call__(self, message: Warning | str, *_: Any, **__: Any) -> None:
        """See ``warnings.showwarning``."""
        text = " ".join(str(message).split())
        if text in self._told:
            return
        self._told.add(text)
        # Below a line of progress that may be there.
        sys.stderr.write(("\n" if sys.stderr.isatty() else "") + f"warning: {text}\n")
        sys.stderr.flush()


def say(text: str) -> None:
    """Print one line; a terminal that is too narrow wraps it between words."""
    from rich.console import Console
    from rich.text import Text

    if sys.stdout.isatty():
        Console(highlight=False).print(Text(text))
    else:
        sys.stdout.write(text + "\n")


def say_written(path: Path | None) -> None:
    """Say where a file went, if there is one."""
    if path is not None:
        sys.stdout.write(f"written to {path}\n")


def note(text: str) -> None:
    """A remark on standard error, so that standard output stays a document."""
    typer.secho(text, err=True, fg="yellow")
