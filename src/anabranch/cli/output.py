"""What the verbs print: one JSON document, or tables and progress for people."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TextIO

if TYPE_CHECKING:
    from anabranch.record import Run
    from anabranch.train import Progress

INTERRUPTED = 130
"""Exit code of a run that Ctrl-C ended, as shells have it: 128 and the number of the signal."""


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


class Warnings:
    """Shows a warning as one paragraph on standard error, once; in place of
    ``warnings.showwarning``, which adds a line of our source.
    """

    def __init__(self) -> None:
        self._told: set[str] = set()

    def __call__(
        self,
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
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


@contextmanager
def progress_bar(title: str) -> Iterator[Callable[[int, int], None]]:
    """Yields ``progress(done, total)``; drawn on standard error, and on a terminal only."""
    with progress_of(title) as progress:
        yield lambda done, total: progress(done, total, title)


@contextmanager
def progress_of(title: str) -> Iterator[Callable[[int, int, str], None]]:
    """As ``progress_bar``, with a title that changes: ``progress(done, total, title)``."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total, now: bar.update(
            task, completed=done, total=total, description=now
        )


def say_stopping() -> None:
    """Answer the first Ctrl-C, below a line of progress that may be there."""
    line = "stopping after the step under way; Ctrl-C again stops at once\n"
    sys.stderr.write(("\n" if sys.stderr.isatty() else "") + line)
    sys.stderr.flush()


def say_stopped(save: Path | None) -> None:
    """After the second Ctrl-C: what is there."""
    there = f"the checkpoint is {save}" if save is not None and save.exists() else "nothing is kept"
    sys.stderr.write(f"stopped at once; {there}\n")


def interrupted(
    run: Run, steps: int | None, epochs: int | None, save: Path | None, out: Path | None = None
) -> str:
    """How far a run came that was ended early, and how to go on; ``out`` as the user named it."""
    done = len(run.losses)
    if done == steps:
        return f"interrupted after the last of {steps} steps, before anything was evaluated"
    of = f" of {steps}" if steps is not None else ""
    text = f"interrupted after {done}{of} steps, with a loss of {run.losses[-1]:.4f} at last"
    if save is None:
        return f"{text}; there is no checkpoint, which --save FOLDER would have written"
    left = [f"--resume {save}", *([f"--epochs {epochs}"] if epochs is not None else [])]
    if steps is not None:
        left.append(f"--steps {steps - done}")
    other = "--save" if out is None else "--save and --out"
    return f"{text}; to go on, the same command with {' '.join(left)} and another {other}"


class TrainingProgress:
    """Shows loss, samples per second and the step beside its prediction, on standard error.

    On a terminal one line is kept up to date; elsewhere a line is written every few seconds. The
    loss is the mean over the last ten, and the time of a mini-batch without a flush the mean since
    the pipeline was full, as in the rows that follow the last line.

    Args:
        predicted_step_s: what the plan says; 0 where it says nothing.
        is_async: what is called a step is a mini-batch without a flush.
        every_s: seconds between lines where there is no terminal.
    """

    def __init__(
        self, predicted_step_s: float, every_s: float = 10.0, *, is_async: bool = False
    ) -> None:
        self._predicted_s = predicted_step_s
        self._every_s, self._is_async = every_s, is_async
        self._started = self._shown = time.monotonic()
        self._seconds: list[float] = []
        self._losses: deque[float] = deque(maxlen=10)
        self._most = 0

    def __call__(self, progress: Progress) -> None:
        """Note one step, and show it if it is time."""
        if progress.seconds:
            self._seconds.append(progress.seconds)
        self._losses.append(progress.loss)
        self._most = max(self._most, progress.samples)
        last = progress.step == progress.total
        terminal = sys.stderr.isatty()
        now = time.monotonic()
        if not last and now - self._shown < (0.1 if terminal else self._every_s):
            return
        self._shown = now
        of = f"/{progress.total}" if progress.total else ""
        metrics = "".join(f", {name} {value:.3f}" for name, value in progress.metrics.items())
        what = "mini-batch" if self._is_async else "step"
        loss = statistics.fmean(self._losses)
        line = f"{what} {progress.step}{of}, {now - self._started:.0f} s: loss {loss:.4f}{metrics}"
        if taken := self._taken():
            line += f", {self._most / taken:.0f} samples/s, {what} {taken * 1e3:.2f} ms"
            if self._predicted_s:
                line += f" (predicted {self._predicted_s * 1e3:.2f})"
        end = "\n" if last or not terminal else ""
        sys.stderr.write(("\r\x1b[2K" if terminal else "") + line + end)
        sys.stderr.flush()

    def _taken(self) -> float:
        """Seconds of a step; 0 where that is not known yet."""
        if not self._seconds:
            return 0.0
        if self._is_async:
            return statistics.fmean(self._seconds)
        # The first step sets things up.
        return statistics.median(self._seconds[-50:])
