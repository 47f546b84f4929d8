"""Work between steps: held-out data is evaluated, checkpoints are written.

All ranks do it between the same steps, and never between the batches of one update::

    run/step-400   checkpoints, of which the newest few are kept
    run/step-600
    run/best       a link to the one whose held-out data did best, which is kept as well
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anabranch.checkpoint import MANIFEST, newest
from anabranch.checkpoint.series import best_evaluation, is_unused, mark_best, step_folder
from anabranch.errors import TrainingError
from anabranch.runtime.asynchronous.pipeline import AsyncPipeline
from anabranch.runtime.guards.interrupt import INTERRUPT, SAVE_CLOCK
from anabranch.runtime.pipeline import Pipeline
from anabranch.runtime.spare_copies import SpareCopies
from anabranch.training.events import CheckpointEvent, EvaluationEvent
from anabranch.training.reporter import Reporter, TrainingClock
from anabranch.workload import Batch

KEPT = 2
"""Checkpoints of a run: the last one, and one before it in case that is damaged."""


@dataclass(frozen=True, slots=True)
class SaveEvery:
    """Checkpoints during training, each in a folder ``step-N`` of the run's; the last step has one.

    Attributes:
        steps: between two of them; None for none by steps.
        seconds: likewise. A checkpoint is written after the step in which it is due, or at the next
            update (``accumulate``).
        keep: how many there are at most, the best not counted.
        best: a held-out mean by which evaluations are compared: ``loss``, of which less is better,
            or ``NAME:max`` or ``NAME:min``. After the best so far a checkpoint is written, the link
            ``best`` leads to it, and it is kept however many follow. Empty for none.

    Raises:
        ValueError: if an interval is not more than 0, or it is not known what is better.
    """

    steps: int | None = None
    seconds: float | None = None
    keep: int = KEPT
    best: str = ""

    def __post_init__(self) -> None:
        intervals = (self.steps, self.seconds, self.keep)
        if any(interval is not None and interval <= 0 for interval in intervals):
            raise ValueError(f"{self}: intervals and the number of checkpoints are more than 0")
        if self.best not in ("", "loss") and self.best.partition(":")[2] not in ("min", "max"):
            raise ValueError(
                f"best {self.best}: say whether more or less of it is better, {self.best}:max or "
                f"{self.best}:min"
            )

    def require_metric(self, metrics: Collection[str]) -> None:
        """Accept ``best`` for a model with these metrics; TrainingError if it is none of them."""
        name = self.best.partition(":")[0]
        if name and name not in ("loss", *metrics):
            raise TrainingError(
                f"the best checkpoint is asked for by {name}, but the held-out means of this model "
                f"are {', '.join(('loss', *metrics))}"
            )

    def score(self, metrics: Mapping[str, float]) -> float:
        """Return the mean that ``best`` names, signed so that more is better; minus infinity where
        there is none.
        """
        name, _, direction = self.best.partition(":")
        value = metrics.get(name, math.nan)
        if not math.isfinite(value):
            return -math.inf
        return value if direction == "max" else -value


class Pauses:
    """Evaluations and checkpoints of a run.

    Args:
        folder: for checkpoints; None for none.
        save_every: when there are several.
        evaluate_every: steps between evaluations; None for none during training.
        evaluates: whether there is held-out data.
        copies: memory for copies of the state, of which training may go on after a failure.
        further: returns what else is copied.
    """

    def __init__(
        self,
        pipe: Pipeline | AsyncPipeline,
        reporter: Reporter,
        clock: TrainingClock,
        *,
        folder: Path | None,
        save_every: SaveEvery | None,
        evaluate_every: int | None,
        evaluates: bool,
        copies: SpareCopies | None = None,
        further: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        self._copies, self._further, self._copied_at = copies, further, -1
        self._pipe, self._reporter, self._clock = pipe, reporter, clock
        self._folder, self._save_every = folder, save_every
        self._evaluate_every, self._evaluates = evaluate_every, evaluates
        self._saved_at = self._evaluated_at = pipe.step_number
        self._goes_on = copies is not None and copies.reported_steps > 0
        if isinstance(pipe, Pipeline) and pipe.copied is not None:
            self._copied_at = pipe.step_number
            self._saved_at -= 1  # a checkpoint of that step may never have been finished
            if save_every is not None and save_every.best:
                self._evaluated_at -= 1  # nor one that its evaluation asked for
        self._metrics: dict[str, float] | None = None  # of the last evaluation
        self._best = -math.inf
        self._unfinished: CheckpointEvent | None = None
        self._unmarked: tuple[Path, Mapping[str, float]] | None = None  # the best, to be complete
        if folder is not None and save_every is not None and save_every.best:
            save_every.require_metric(pipe.metric_names)
            self._best = pipe.from_first(save_every.score(best_evaluation(folder)))
        seconds = save_every.seconds if save_every is not None else None
        SAVE_CLOCK.start(seconds, rank=pipe.rank)

    def between(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """The same batches, before each what is due after the step before.

        Where training is to end early there are no more, but never between the batches of an
        update; what is due is done all the same, as the run that goes on will not do it.
        """
        while True:
            self._look()
            ends = INTERRUPT.agreed and self._pipe.is_between_updates
            batch = None if ends else next(batches, None)
            if batch is None:
                return
            yield batch

    def _look(self) -> None:
        """All ranks look between the same steps."""
        self._look_for_finished()
        if self._save_every is not None and self._folder is not None:
            SAVE_CLOCK.look()
        if not self._pipe.is_between_updates:
            return
        is_best = self._is_crossed(self._evaluate_every, self._evaluated_at) and self._evaluate()
        if self._folder is not None and self._save_every is not None:
            self._look_for_checkpoint(self._save_every, is_best=is_best)
        self._look_for_copy()

    def _look_for_copy(self) -> None:
        """Copy the state behind the first step, and when it is due; behind the last there is none,
        so that whoever goes on has a step to do. Nor is there one before the first: whoever begins
        anew compares gradients anew.
        """
        pipe, done = self._pipe, self._pipe.step_number
        if self._copies is None or not isinstance(pipe, Pipeline):
            return
        first, total = self._reporter.first_step, self._reporter.total
        is_first = self._copied_at < 0
        is_due = is_first or done - self._copied_at >= self._copies.every
        if is_due and done > first and (total is None or done < first + total):
            # That of the first step counts at once, so the next one may come earlier.
            self._copied_at = first if is_first else done
            pipe.copy_state(self._further(), self._reporter.noting())

    def _look_for_checkpoint(self, save_every: SaveEvery, *, is_best: bool) -> None:
        now = self._pipe.step_number
        by_steps = self._is_crossed(save_every.steps, self._saved_at)
        is_due = (by_steps or SAVE_CLOCK.is_due) and now > self._saved_at
        if is_due or is_best:
            self._begin(wait=False)

    def _is_crossed(self, every: int | None, before: int) -> bool:
        """True if a multiple of an interval lies between an earlier step and this one."""
        return every is not None and self._pipe.step_number // every > before // every

    def _evaluate(self) -> bool:
        """Evaluate, and say whether this is the best so far, with a place to keep it."""
        started = time.perf_counter()
        with self._clock.paused():
            metrics = self._pipe.evaluate()
        seconds = time.perf_counter() - started
        self._evaluated_at, self._metrics = self._pipe.step_number, metrics
        score = -math.inf
        if self._folder is not None and self._save_every is not None:
            score = self._save_every.score(metrics)
        is_best = score > self._best
        if is_best and self._folder is not None:
            self._unmarked = step_folder(self._folder, self._evaluated_at), metrics
        self._best = max(score, self._best)
        self._reporter.tell(EvaluationEvent(self._evaluated_at, metrics, seconds, is_best))
        return is_best

    def _begin(self, *, wait: bool) -> None:
        assert self._folder is not None
        assert self._save_every is not None
        self._finish()
        self._saved_at = self._pipe.step_number
        SAVE_CLOCK.begin()
        folder = step_folder(self._folder, self._saved_at)
        if self._is_there(folder):
            return
        self._unfinished = CheckpointEvent(self._saved_at, folder)
        self._pipe.save(folder, wait=wait, keep=self._save_every.keep)

    def _is_there(self, folder: Path) -> bool:
        """True if a checkpoint was written before the failure after which steps are done again."""
        return self._goes_on and bool(self._pipe.from_first(float(folder.exists())))

    def _finish(self) -> None:
        self._pipe.finish_saving()
        self._look_for_finished()

    def _look_for_finished(self) -> None:
        if self._unfinished is not None and self._unfinished.folder.exists():
            self._reporter.tell(self._unfinished)
            self._unfinished = None
        if self._unmarked is not None and self._unmarked[0].exists():
            if self._pipe.rank == 0:
                with self._pipe.failing():
                    mark_best(*self._unmarked)
            self._unmarked = None

    def end(self) -> Mapping[str, float] | None:
        """After the last step: keep what was trained before anything else can fail, then evaluate,
        unless the run was interrupted.

        Returns:
            Held-out means of the last step, if there are any.
        """
        if self._folder is not None and self._save_every is None:
            if not self._is_there(self._folder):
                self._pipe.save(self._folder)
            self._reporter.tell(CheckpointEvent(self._pipe.step_number, self._folder))
        elif self._folder is not None and self._saved_at < self._pipe.step_number:
            self._begin(wait=True)
        self._finish()
        is_known = self._metrics is not None and self._evaluated_at == self._pipe.step_number
        if self._evaluates and not is_known and not INTERRUPT.agreed:
            self._evaluate()
            self._look_for_finished()
            is_known = True
        return self._metrics if is_known else None


def require_place(folder: Path | None, resumed: Path | None, *, is_series: bool) -> None:
    """Accept the folder for a checkpoint, if any.

    Args:
        resumed: the checkpoint that training goes on from.
        is_series: the folder is for several checkpoints, which may be put beside that one.

    Raises:
        TrainingError: if the folder exists.
    """
    if folder is None or not folder.exists() or (is_series and is_unused(folder)):
        return
    last = newest(folder) if is_series and resumed is not None else None
    if last is None or resumed is None or (folder / MANIFEST).exists():
        raise TrainingError(
            f"{folder} exists; checkpoints are never written over, name a new folder"
        )
    if resumed.resolve() not in (folder.resolve(), last.resolve()):
        raise TrainingError(
            f"{folder} exists, and the checkpoint to resume from, {resumed}, is not the last one "
            "in it; checkpoints are never written over, name a new folder"
        )
