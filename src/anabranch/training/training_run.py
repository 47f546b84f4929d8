"""A run around its steps: its beginning, the work between steps, its end.

All ranks evaluate and write checkpoints between the same steps, and never between the batches of
one update.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from inspect import signature
from itertools import islice
from pathlib import Path
from typing import Any, Generic, TypeVar

from anabranch.checkpoint.series import best_evaluation, mark_best, step_folder
from anabranch.errors import DataError, TrainingError, suggestion, warn
from anabranch.plans.plan import Plan
from anabranch.record import Evaluation, Run
from anabranch.record.run import finite
from anabranch.runtime.asynchronous.pipeline import AsyncPipeline
from anabranch.runtime.guards.interrupt import INTERRUPT, SAVE_CLOCK
from anabranch.runtime.pipeline import Pipeline
from anabranch.runtime.state.spare_copies import SpareCopies
from anabranch.training.events import Callback, CheckpointEvent, EndEvent, EvaluationEvent
from anabranch.training.reporter import Reporter, TrainingClock
from anabranch.training.save_every import SaveEvery, require_place
from anabranch.workload import Batch, Workload

_Pipe = TypeVar("_Pipe", Pipeline, AsyncPipeline)


class TrainingRun(Generic[_Pipe]):
    """A run around its steps; arguments are those of ``train``.

    Attributes:
        batches: batches up to the last step, or until training ends early.
        start_s: seconds in which the pipeline was made.
    """

    def __init__(
        self,
        kind: type[_Pipe],
        workload: Workload,
        plan: Plan,
        *,
        steps: int | None = None,
        epochs: int | None = None,
        resume: str | Path | None = None,
        weights: str | Path | None = None,
        save: str | Path | None = None,
        save_every: SaveEvery | None = None,
        evaluate_every: int | None = None,
        callbacks: Sequence[Callback] = (),
        on_trained: Callable[[Run], None] | None = None,
        **options: Any,
    ) -> None:
        known = {*signature(TrainingRun).parameters, *signature(kind).parameters}
        for name in options.keys() - known:
            raise TypeError(f"train has no argument {name!r}{suggestion(name, known)}")
        if steps is None and epochs is None:
            raise ValueError("give a number of steps or of epochs")
        require_evaluation(workload, evaluate_every, steps)
        self._workload, self._evaluate_every = workload, evaluate_every
        self._evaluates_alone, self._on_trained = steps == 0, on_trained
        self._resume = None if resume is None else Path(resume)
        self._folder = None if save is None else Path(save)
        self._copies: SpareCopies | None = options.get("copies")
        self._goes_on = self._copies is not None and self._copies.reported_steps.value > 0
        began = time.perf_counter()
        make: Callable[..., _Pipe] = kind
        if self._copies is not None and self._copies.newest is not None:
            pass  # it goes on from there
        elif resume is not None:
            make = partial(kind.resume, resume)
        elif weights is not None:
            make = partial(kind.from_weights, weights)
        self.pipe: _Pipe = make(workload, plan, **options)
        self.start_s = time.perf_counter() - began
        # Last steps that were saved, evaluated and copied.
        self._first_step = self._saved_step = self._evaluated_step = self.pipe.step_number
        self._copied_step: int | None = None
        self._evaluations: list[Evaluation] = []
        if isinstance(self.pipe, Pipeline) and self.pipe.copied is not None:
            self._take_over(self.pipe.copied, save_every)
        done = self.pipe.step_number - self._first_step
        if epochs is not None and self._first_step and not (self.pipe.epoch or self.pipe.position):
            _warn_of_untold_epochs(self.pipe)
        if not self._goes_on:  # else its own checkpoints may be there
            require_place(self._folder, self._resume, is_series=save_every is not None)
        left = None if epochs is None else self.pipe.batches_left(epochs)
        left = None if left is None else left + done
        total = min((n for n in (steps, left) if n is not None), default=None)
        self.reporter = Reporter(self.pipe, total, callbacks, self._first_step, self._copies)
        self.clock = TrainingClock()
        self._begin_series(save_every if self._folder is not None else None)
        batches = self._between(self.pipe.batches(epochs=epochs))
        self.batches = islice(batches, None if steps is None else max(steps - done, 0))

    def _take_over(self, copied: Mapping[str, Any], save_every: SaveEvery | None) -> None:
        """Go on from a copy in memory. Only checkpoints before its step count as saved: that of its
        step, and one that the evaluation of its step asked for, may be unfinished.
        """
        self._first_step, self._copied_step = int(copied["first_step"]), self.pipe.step_number
        self._saved_step = self.pipe.step_number - 1
        if save_every is not None and save_every.best:
            self._evaluated_step = self.pipe.step_number - 1
        made = (Evaluation(**kept) for kept in copied["evaluations"])
        self._evaluations = [e for e in made if e.step <= self._evaluated_step]

    def _begin_series(self, save_every: SaveEvery | None) -> None:
        """Start the intervals between several checkpoints, if there are to be some."""
        self._save_every = save_every
        self._metrics: dict[str, float] | None = None  # of the last evaluation
        self._best = -math.inf
        self._unfinished: CheckpointEvent | None = None
        self._unmarked: tuple[Path, Mapping[str, float]] | None = None  # best, not yet complete
        if self._folder is not None and save_every is not None and save_every.best:
            save_every.require_metric(self.pipe.metric_names)
            best = save_every.score(best_evaluation(self._folder))
            self._best = self.pipe.from_first(best)
        seconds = save_every.seconds if save_every is not None else None
        SAVE_CLOCK.start(seconds, rank=self.pipe.rank)

    def _between(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Generate the same batches; before each, do the work that is due after the last step.

        If training is to end early, batches end, but never between the batches of an update. Due
        work is done all the same, as a resumed run does not do it.
        """
        while True:
            self._look()
            ends = INTERRUPT.agreed and self.pipe.is_between_updates
            batch = None if ends else next(batches, None)
            if batch is None:
                return
            yield batch

    def _look(self) -> None:
        """Do the work that is due, between the same steps on all ranks."""
        self._look_for_finished()
        if self._save_every is not None:
            SAVE_CLOCK.look()
        if not self.pipe.is_between_updates:
            return
        # Behind the last step weights are saved first, so it is evaluated later (``_end``).
        evaluates = INTERRUPT.agreed or not self._is_over
        evaluates &= self._is_crossed(self._evaluate_every, self._evaluated_step)
        is_best = evaluates and self._evaluate()
        if self._save_every is not None:
            is_due = self._is_crossed(self._save_every.steps, self._saved_step) or SAVE_CLOCK.is_due
            if is_best or (is_due and self.pipe.step_number > self._saved_step):
                self._begin(wait=False)
        self._look_for_copy()

    @property
    def _is_over(self) -> bool:
        """True behind the last step, if that is known."""
        total = self.reporter.total
        return total is not None and self.pipe.step_number >= self._first_step + total

    def _look_for_copy(self) -> None:
        """Copy the state behind the first step, and whenever it is due. There is no copy behind the
        last step, so that a recovery has a step to do, and none before the first: without a step
        done, gradients are compared anew.
        """
        pipe, done = self.pipe, self.pipe.step_number
        if self._copies is None or not isinstance(pipe, Pipeline):
            return
        before = self._copied_step
        is_due = before is None or done - before >= self._copies.every
        if is_due and done > self._first_step and not self._is_over:
            # The interval starts at the first step, so the copy after the first comes earlier.
            self._copied_step = self._first_step if before is None else done
            kept = {
                "first_step": self._first_step,
                "evaluations": [*map(asdict, self._evaluations)],
            }
            pipe.copy_state(kept, self.reporter.noting())

    def _is_crossed(self, every: int | None, before: int) -> bool:
        """Return True if a multiple of an interval lies between an earlier step and this one."""
        return every is not None and self.pipe.step_number // every > before // every

    def _evaluate(self) -> bool:
        """Evaluate, and return True if this is the best so far."""
        started = time.perf_counter()
        with self.clock.paused():
            metrics = self.pipe.evaluate()
        seconds = time.perf_counter() - started
        self._evaluated_step, self._metrics = self.pipe.step_number, metrics
        self._evaluations.append(Evaluation(self._evaluated_step, finite(metrics)))
        score = -math.inf if self._save_every is None else self._save_every.score(metrics)
        is_best = score > self._best
        if is_best and self._folder is not None:
            self._unmarked = step_folder(self._folder, self._evaluated_step), metrics
        self._best = max(score, self._best)
        self.reporter.tell(EvaluationEvent(self._evaluated_step, metrics, seconds, is_best))
        return is_best

    def _begin(self, *, wait: bool) -> None:
        assert self._folder is not None
        assert self._save_every is not None
        self._finish()
        self._saved_step = self.pipe.step_number
        SAVE_CLOCK.begin()
        folder = step_folder(self._folder, self._saved_step)
        if self._is_there(folder):
            return
        self._unfinished = CheckpointEvent(self._saved_step, folder)
        self.pipe.save(folder, wait=wait, keep=self._save_every.keep)

    def _is_there(self, folder: Path) -> bool:
        """Return True if a checkpoint is from before the failure after which steps are repeated."""
        return self._goes_on and bool(self.pipe.from_first(folder.exists()))

    def _finish(self) -> None:
        self.pipe.finish_saving()
        self._look_for_finished()

    def _look_for_finished(self) -> None:
        if self._unfinished is not None and self._unfinished.folder.exists():
            self.reporter.tell(self._unfinished)
            self._unfinished = None
        if self._unmarked is not None and self._unmarked[0].exists():
            if self.pipe.rank == 0:
                with self.pipe.failing():
                    mark_best(*self._unmarked)
            self._unmarked = None

    def _end(self) -> Mapping[str, float] | None:
        """Save after the last step, before anything else can fail, then evaluate, unless the run
        was interrupted.

        Returns:
            Held-out means of the last step, if there are any.
        """
        if self._folder is not None and self._save_every is None:
            if not self._is_there(self._folder):
                self.pipe.save(self._folder)
            self.reporter.tell(CheckpointEvent(self.pipe.step_number, self._folder))
        elif self._folder is not None and self._saved_step < self.pipe.step_number:
            self._begin(wait=True)
        self._finish()
        is_known = self._metrics is not None and self._evaluated_step == self.pipe.step_number
        if self._workload.eval_data is not None and not is_known and not INTERRUPT.agreed:
            self._evaluate()
            self._look_for_finished()
            is_known = True
        return self._metrics if is_known else None

    def require_steps(self) -> None:
        if self.reporter.losses or self._evaluates_alone:
            return
        if INTERRUPT.agreed:
            raise TrainingError(
                "training was asked to end, by Ctrl-C, before it began: start it anew"
            )
        raise nothing_left(self._resume, self.pipe.epoch)

    def finished(self, **figures: Any) -> Run:
        """Make the run from its figures, then save and evaluate once more."""
        run = Run(
            losses=tuple(self.reporter.losses),
            metrics=dict(self.pipe.metrics),
            chance=dict(self._workload.chance),
            gradients=self.pipe.gradient_verdict if self.reporter.losses else "",
            resumed="" if self._resume is None else str(self._resume),
            first_step=self._first_step,
            samples=tuple(self.reporter.samples),
            evaluations=tuple(self._evaluations),
            **figures,
        )
        if self._on_trained is not None and self.pipe.rank == 0:
            self._on_trained(run)
        if (held_out := self._end()) is not None:
            run = replace(run, metrics=dict(held_out), evaluations=tuple(self._evaluations))
        self.reporter.tell(EndEvent(self.pipe.step_number, run.metrics, INTERRUPT.agreed))
        return replace(run, interrupted=INTERRUPT.agreed)


def _warn_of_untold_epochs(pipe: _Pipe) -> None:
    """Warn that a checkpoint comes from a loop with batches of its own."""
    if pipe.rank == 0:
        warn(
            f"the checkpoint is of step {pipe.step_number}, but of no epoch: a loop of its own has "
            "trained it, which read its data itself, so epochs and batches count from here; "
            "ask for those that are left, or read by Pipeline.batches in the loop"
        )


def nothing_left(resume: Path | None, done: int) -> TrainingError:
    """Return the error for a checkpoint that has all epochs."""
    return TrainingError(
        f"nothing is left to do: {resume} has {done} epochs already; ask for more than {done}"
    )


def require_evaluation(workload: Workload, every: int | None, steps: int | None = None) -> None:
    """Check that evaluations during training, or a run without steps, can be done.

    Raises:
        DataError: if there is no held-out data.
        ValueError: if the interval is less than 1.
    """
    if every is not None and every < 1:
        raise ValueError(f"evaluate_every is {every}; it counts steps, from 1")
    if (every is not None or steps == 0) and workload.eval_data is None:
        when = "without a step" if steps == 0 else f"every {every} steps"
        raise DataError(
            f"held-out data is to be evaluated {when}, but the workload has none; "
            "give Workload an eval_data"
        )
