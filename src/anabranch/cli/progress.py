"""Progress of long work, on standard error."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from anabranch.calibration.machine import OtherLoad
from anabranch.cli import torchrun
from anabranch.cli.output import note
from anabranch.device.kinds import CPU

if TYPE_CHECKING:
    from anabranch.graph.capture import Captured
    from anabranch.profile.profile import Profile
    from anabranch.training import Event, StepEvent
    from anabranch.workload import Workload

_CLEAR = "\r\x1b[2K"
_LEAST_BAR, _MOST_BAR = 8, 40
"""Columns of the bar."""


@contextmanager
def progress_bar(title: str) -> Iterator[Callable[..., None]]:
    """Yields ``progress(done, total, title)``, the title only where it changes.

    Drawn on standard error; where that is no terminal, each title is a line.
    """
    from rich.console import Console
    from rich.progress import Progress

    console, hidden = Console(stderr=True), not sys.stderr.isatty()
    if hidden:
        announce(title)
    with Progress(console=console, transient=True, disable=hidden) as bar:
        task = bar.add_task(title, total=None)

        def progress(done: int, total: int, title: str | None = None) -> None:
            bar.update(task, completed=done, total=total, description=title)
            if hidden and title is not None:
                announce(title)

        yield progress


def announce(what: str) -> None:
    """Say on standard error that work begins of which nothing else is seen for some seconds."""
    if torchrun.is_first():
        sys.stderr.write(f"{what} ...\n")
        sys.stderr.flush()


def measured(
    workload: Workload, samples: tuple[int, ...], captured: Captured, device: str, model: str
) -> Profile:
    """Time the operators of a workload here, with a progress bar; note if others compute, too."""
    from anabranch.runtime.measurement.workload import measure_workload

    load = OtherLoad()
    with progress_bar(f"measuring {model} on {device}") as progress:
        profile = measure_workload(
            workload, samples, captured=captured, device=device, progress=progress
        )
    if device == CPU and (text := load.remark(model)):
        note(text)
    return profile


class TrainingProgress:
    """Shows loss, samples per second and the step beside its prediction, on standard error.

    A terminal shows a bar, and as many figures as its line holds; elsewhere a line is written every
    ten seconds. Loss and metrics are means over the last ten steps; without a flush (``is_async``)
    the time of a mini-batch is the mean since the pipeline was full. A ``predicted_step_s`` of 0 is
    not shown. The first thing that was slow at the last look is named, and each evaluation has a
    line. The count of steps includes those before the run was resumed or started again.
    """

    def __init__(self, predicted_step_s: float, *, is_async: bool = False) -> None:
        self._predicted_s, self._is_async = predicted_step_s, is_async
        self._started = self._shown = time.monotonic()
        self._seconds: list[float] = []
        self._samples: list[int] = []
        self._last: deque[StepEvent] = deque(maxlen=10)
        self._slow = ""

    def __call__(self, event: Event) -> None:
        """Note an event; show a step if it is time."""
        from anabranch.training.events import EvaluationEvent, LookEvent, PlanEvent, StepEvent

        terminal = sys.stderr.isatty()
        if isinstance(event, LookEvent):
            slow, self._slow = self._slow, event.slow[0] if event.slow else ""
            if terminal and self._slow not in ("", slow):
                sys.stderr.write(f"{_CLEAR}{self._slow}\n")
        if isinstance(event, EvaluationEvent):
            means = ", ".join(f"{name} {mean:.4f}" for name, mean in event.metrics.items())
            best = ", the best so far" * event.is_best
            what = "mini-batch" if self._is_async else "step"
            sys.stderr.write(f"{_CLEAR * terminal}{what} {event.step}, held out: {means}{best}\n")
        if isinstance(event, PlanEvent):
            self._predicted_s, self._slow = event.predicted_s or 0.0, ""
            self._seconds.clear()
            self._samples.clear()
        if not isinstance(event, StepEvent):
            return
        if event.seconds:
            self._seconds.append(event.seconds)
            self._samples.append(event.samples)
        self._last.append(event)
        last = event.done == event.total
        now = time.monotonic()
        if not last and now - self._shown < (0.1 if terminal else 10.0):
            return
        self._shown = now
        count, parts = self._words(event, now)
        slow = f"; {self._slow}" if self._slow else ""
        line = self._bar(event, count, parts) if terminal else ", ".join([count, *parts]) + slow
        sys.stderr.write(_CLEAR * terminal + line + "\n" * (last or not terminal))
        sys.stderr.flush()

    def _words(self, event: StepEvent, now: float) -> tuple[str, list[str]]:
        """Return the count of steps as text, and further texts, the most important first."""
        from statistics import fmean, median

        what = "mini-batch" if self._is_async else "step"
        total = f"/{event.step - event.done + event.total}" if event.total else ""
        parts = [f"loss {fmean(event.loss for event in self._last):.4f}"]
        time_text = f"{_clock(now - self._started)} passed"
        if self._seconds:
            # With a flush a median: the first step also sets things up.
            mean = fmean if self._is_async else lambda per_step: median(per_step[-50:])
            taken = mean(self._seconds)
            if event.total and event.done < event.total:
                time_text = f"{_clock(taken * (event.total - event.done))} left"
            against = f", predicted {self._predicted_s * 1e3:,.2f}" if self._predicted_s else ""
            speed = f"{mean(self._samples) / taken:,.0f} samples/s"
            parts += [time_text, speed, f"{taken * 1e3:,.2f} ms{against}"]
        else:
            parts.append(time_text)
        metrics: dict[str, list[float]] = {}
        for event in self._last:
            for name, value in event.metrics.items():
                metrics.setdefault(name, []).append(value)
        parts += [f"{name} {fmean(values):.3f}" for name, values in metrics.items()]
        return f"{what} {event.step}{total}", parts

    def _bar(self, event: StepEvent, count: str, parts: Sequence[str]) -> str:
        """Return one line of the terminal: a bar, and the texts that fit beside it."""
        from rich.console import Console
        from rich.progress_bar import ProgressBar

        console = Console(stderr=True)
        room = console.width - 1
        least = len(count) + 1 + (_LEAST_BAR + 1) * bool(event.total)
        while len(parts) > 1 and least + len("  ".join(parts)) > room:
            parts = parts[:-1]
        line = "  ".join(parts)
        width = min(room - len(count) - len(line) - 2, _MOST_BAR)
        if not event.total or width < _LEAST_BAR:
            return f"{count} {line}"[:room]
        with console.capture() as bar:
            before = event.step - event.done
            console.print(ProgressBar(before + event.total, event.step, width=width), end="")
        return f"{count} {bar.get()} {line}"


def _clock(seconds: float) -> str:
    """Format seconds as ``m:ss``, or as ``h:mm:ss`` from an hour on."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
