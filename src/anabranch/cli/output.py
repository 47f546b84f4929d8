"""Output of the verbs: one JSON document, or lines and tables for people, and warnings.

A verb prints both; ``answering`` drops the one that is not asked for.

Files and folders to write are refused before a command has done anything: options name a check as
their callback, so it is made while the command line is read.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Literal

import typer

from anabranch.errors import AnabranchError, OutputError, SearchStoppedError

INTERRUPTED = 130
"""Exit code after Ctrl-C, as in shells: 128 plus the number of the signal."""


_IN_JSON: ContextVar[bool] = ContextVar("in_json", default=False)


def in_json() -> bool:
    """Return True if the answer is a JSON document, without any text."""
    return _IN_JSON.get()


@contextmanager
def answering(*, as_json: bool) -> Iterator[None]:
    """Print documents and no text inside the block, or text and no documents."""
    before = _IN_JSON.set(as_json)
    try:
        yield
    finally:
        _IN_JSON.reset(before)


def exit_code(error: AnabranchError) -> int:
    return INTERRUPTED if isinstance(error, SearchStoppedError) else 1


def json_text(document: Mapping[str, Any]) -> str:
    """Format a document for printing; paths become strings."""
    return json.dumps(document, indent=2, allow_nan=False, default=str) + "\n"


def print_json(document: Mapping[str, Any]) -> None:
    """Print one JSON document on standard output, if that is asked for."""
    if in_json():
        sys.stdout.write(json_text(document))


def _print(text: str) -> None:
    """Print text for people."""
    if not in_json():
        sys.stdout.write(text)


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table; the first column is text and may wrap, the others are figures."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    # Wide tables stay whole in a file or a pipe.
    room = _columns(otherwise=160)
    console = Console(width=room, highlight=False, quiet=in_json())
    console.print(Text(title, "italic"), no_wrap=True, overflow="ellipsis")
    if _needed(columns, rows) > room:
        for row in rows:
            console.print(Text(row[0], "bold"))
            cells = zip(columns[1:], row[1:], strict=True)
            rows_shown = [(" ".join(column.split()), cell) for column, cell in cells if cell != "-"]
            print_rows(rows_shown)
        return
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for i, column in enumerate(columns):
        justify: Literal["left", "right"] = "right" if i else "left"
        table.add_column(column, justify=justify, vertical="bottom", overflow="fold", no_wrap=i > 0)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    console.print(table)


def _needed(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> int:
    """Return the width of a table in characters, with at most 14 for its first column."""
    cells = [[*column.splitlines(), *(row[i] for row in rows)] for i, column in enumerate(columns)]
    first, *others = (max(map(len, column)) for column in cells)
    return min(first, 14) + sum(others) + len(others)


def print_rows(rows: Sequence[tuple[str, str]]) -> None:
    """Print pairs of a name and a text, which wraps beside the name, not below it."""
    from textwrap import wrap

    room = _columns()
    beside = min(22, room // 3)
    for name, text in rows:
        lines = wrap(text, max(room - beside - 3, 16)) or [""]
        if len(name) > beside:
            lines = ["", *lines]
        for i, line in enumerate(lines):
            _print(f"  {'' if i else name:{beside}s} {line}".rstrip() + "\n")


def _columns(otherwise: int = 80) -> int:
    """Return the characters of a line: those of ``COLUMNS``, the terminal's, or ``otherwise``."""
    from shutil import get_terminal_size

    return get_terminal_size((otherwise, 24)).columns


_TORCHS_OWN = "Sparse invariant checks are implicitly disabled"
"""Beginning of a warning about sparse gradients that torch's own optimizers make, not the user."""


class Warnings:
    """Shows each warning once, as a paragraph on standard error, as ``warnings.showwarning``."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def __call__(self, message: Warning | str, *_: Any, **__: Any) -> None:
        text = " ".join(str(message).split())
        if text in self._told or text.startswith(_TORCHS_OWN):
            return
        self._told.add(text)
        # A line of progress may be there.
        sys.stderr.write(("\n" if sys.stderr.isatty() else "") + f"warning: {text}\n")
        sys.stderr.flush()


def say(text: str) -> None:
    """Print lines; where a terminal is too narrow, they wrap with an indent."""
    from textwrap import wrap

    room = _columns() if sys.stdout.isatty() else 0
    for line in text.splitlines():
        indent = " " * (len(line) - len(line.lstrip()) + 4)
        lines = wrap(line, room, subsequent_indent=indent) if 20 < room < len(line) else [line]
        _print("\n".join(lines) + "\n")


def say_written(path: Path | None) -> None:
    if path is not None:
        _print(f"written to {path}\n")


def note(text: str) -> None:
    """Print a remark on standard error, so that standard output stays a document."""
    typer.secho(text, err=True, fg=None if os.environ.get("NO_COLOR") else "yellow")


_REMARKS: dict[str, bool] = {}
"""Remark on a prediction -> whether it was said."""


def remark(text: str) -> None:
    """Keep a remark on a prediction for the end of the result."""
    _REMARKS.setdefault(text, False)


def say_remarks() -> None:
    """Note the remarks that were kept, each once, in one line."""
    if waiting := [text for text, is_said in _REMARKS.items() if not is_said]:
        sys.stdout.flush()
        note("; ".join(waiting))
    _REMARKS.update(dict.fromkeys(waiting, True))


@contextmanager
def remarks_at_end() -> Iterator[None]:
    """Keep the remarks of a block until its end; a failure drops them."""
    _REMARKS.clear()
    yield
    say_remarks()


def say_error(text: str) -> None:
    typer.secho(text, err=True, fg=None if os.environ.get("NO_COLOR") else "red")


def without_colour() -> None:
    """Drop ``FORCE_COLOR`` and the like where there is ``NO_COLOR``."""
    if os.environ.get("NO_COLOR"):
        for name in ("FORCE_COLOR", "CLICOLOR_FORCE", "PY_COLORS", "TTY_COMPATIBLE"):
            os.environ.pop(name, None)


def file_to_write(path: Path | None) -> Path | None:
    """Accept a file that is new, or may be written over, in a folder that exists."""
    if path is None:
        return None
    if path.is_dir():
        raise OutputError(f"{path} is a folder; name a file in it")
    if path.exists():
        if not os.access(path, os.W_OK):
            raise OutputError(f"{path} cannot be written over; name another file")
        return path
    folder = path.absolute().parent
    if not folder.exists():
        raise OutputError(
            f"{path} cannot be written: there is no folder {folder}; make it first, or name "
            "another file"
        )
    if why := why_not(folder):
        raise OutputError(f"{path} cannot be written: {why}; name another file")
    return path


def folder_to_write(path: Path | None) -> Path | None:
    """Accept a folder that exists or can be made."""
    if path is not None and path.is_file():
        raise OutputError(f"{path} is a file, which is not written over; give another name")
    if path is not None and (why := why_not(path)):
        raise OutputError(f"{path} cannot be written: {why}; name another folder")
    return path


def why_not(folder: Path) -> str:
    """Return the reason why a folder, or the nearest existing one above it, cannot be written to;
    empty if it can. A file is tried, as permissions do not tell if a disk is read-only.
    """
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir():
        return f"{there} is a file"
    try:
        with tempfile.TemporaryFile(dir=there):
            return ""
    except OSError as error:
        return f"{there} takes no files ({error.strerror})"
