"""Progress of what takes a while, on standard error."""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from anabranch.training import Event


@contextmanager
def progress_bar(title: str) -> Iterator[Callable[..., None]]:
    """Yields ``progress(done, total, title)``, the title only where it changes.

    Drawn on standard error, and on a terminal only.
    """
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total, title=None: bar.update(
            task, completed=done, total=total, description=title
        )


def begin_compiling(planner: str) -> None:
    """Begin to compile what takes longest in a search, as far as it is not kept."""
    if planner not in ("auto", "chain"):
        return
    from anabranch.cluster import Cluster
    from anabranch.compiled import begin
    from anabranch.cost import CostModel
    from anabranch.graph.opgraph import Op, OpGraph
    from anabranch.planner.auto.draft import draft_of
    from anabranch.planner.auto.evaluator import Evaluator
    from anabranch.planner.auto.stage_clock import step_s
    from anabranch.plans.stages import Stage, StageGraph
    from anabranch.profile.profile import OpCost, Profile
    from anabranch.simulator.events import play
    from anabranch.solve import plan

    graph, costs = OpGraph((Op("any"),), ()), (OpCost((1.0,), (1.0,), 0),)
    profile = Profile(graph, (1,), costs, device="any", source="estimated")
    cluster = Cluster.preset("local:1")

    def evaluate() -> None:
        cost, stage = CostModel(profile, cluster), Stage(("any",), (0,), 1)
        Evaluator(cost, 1)(draft_of(StageGraph((stage,), (), 1), cost))

    os.environ.setdefault("NUMBA_OPT", "1")  # compiles in four fifths of the time, as quick a code
    begin({step_s: evaluate, play: lambda: plan(profile, cluster, 1, planner="graphpipe")})


class TrainingProgress:
    """Shows loss, samples per second and the step beside its prediction, on standard error.

    On a terminal one line is kept up to date; elsewhere a line is written every ``every_s``
    seconds. The loss is the mean over the last ten, the time of a mini-batch without a flush
    (``is_async``) the mean since the pipeline was full. A ``predicted_step_s`` of 0 says nothing.
    What was slow beside the others at the last look is named.
    """

    def __init__(
        self, predicted_step_s: float, every_s: float = 10.0, *, is_async: bool = False
    ) -> None:
        self._predicted_s = predicted_step_s
        self._every_s, self._is_async = every_s, is_async
        self._started = self._shown = time.monotonic()
        self._seconds: list[float] = []
        self._samples: list[int] = []
        self._losses: deque[float] = deque(maxlen=10)
        self._slow = ""

    def __call__(self, event: Event) -> None:
        """Note one step, and show it if it is time."""
        from anabranch.training.events import LookEvent, PlanEvent, StepEvent

        if isinstance(event, LookEvent):
            self._slow = event.slow[0] if event.slow else ""
        if isinstance(event, PlanEvent):
            self._predicted_s, self._slow = event.predicted_s or 0.0, ""
            self._seconds.clear()
            self._samples.clear()
        if not isinstance(event, StepEvent):
            return
        if event.seconds:
            self._seconds.append(event.seconds)
            self._samples.append(event.samples)
        self._losses.append(event.loss)
        last = event.done == event.total
        terminal = sys.stderr.isatty()
        now = time.monotonic()
        if not last and now - self._shown < (0.1 if terminal else self._every_s):
            return
        self._shown = now
        total = f"/{event.total}" if event.total else ""
        metrics = "".join(f", {name} {value:.3f}" for name, value in event.metrics.items())
        what = "mini-batch" if self._is_async else "step"
        loss = sum(self._losses) / len(self._losses)
        line = f"{what} {event.done}{total}, {now - self._started:.0f} s: loss {loss:.4f}{metrics}"
        if self._seconds:
            taken = self._typical(self._seconds)
            rate = self._typical(self._samples) / taken
            line += f", {rate:.0f} samples/s, {what} {taken * 1e3:.2f} ms"
            if self._predicted_s:
                line += f" (predicted {self._predicted_s * 1e3:.2f})"
        if self._slow:
            line += f"; {self._slow}"
        end = "\n" if last or not terminal else ""
        sys.stderr.write(("\r\x1b[2K" if terminal else "") + line + end)
        sys.stderr.flush()

    def _typical(self, per_step: Sequence[float]) -> float:
        from statistics import fmean, median

        # A flush has a first step that sets things up.
        return fmean(per_step) if self._is_async else median(per_step[-50:])
