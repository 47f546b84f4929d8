"""Training that goes on by itself after a failure, from its last checkpoint or copies in memory.

Local ranks are started again by the command, ranks of torchrun by torchrun, which says how often.
Either way an attempt does the rest of the run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING

from anabranch.cli import torchrun
from anabranch.cli.output import note
from anabranch.cli.training.job import Job
from anabranch.cli.training.run_results import how_after_failure
from anabranch.cli.training.training_settings import TrainingSettings
from anabranch.device.kinds import CPU
from anabranch.errors import AnabranchError, StageFailedError, TrainingError

if TYPE_CHECKING:
    from pathlib import Path

    from anabranch.plans.plan import Plan
    from anabranch.record import Run
    from anabranch.runtime.state.spare_copies import Survival


def surviving(
    job: Job,
    training: TrainingSettings,
    devices: int,
    fewer: Callable[[int], float],
    predicted_s: float,
    record: Callable[[str], None],
) -> Survival:
    """Return the way on where ranks die: under the job's plan, or another one for fewer devices.

    Args:
        fewer: plans the job for so many devices, makes its programs, and returns the predicted
            seconds of a step.
        predicted_s: those of the job's plan.
        record: called with the step and the reason of each recovery, as text.
    """
    from anabranch.runtime.state.spare_copies import Moment, SpareCopies, Survival

    def begin(ranks: int, failure: str, moment: Moment | None) -> tuple[Plan, float]:
        nonlocal predicted_s
        assert job.plan is not None
        step = first_step(training) if moment is None else moment.step
        note(f"{failure}; goes on from step {step:,}")
        how = ""
        if ranks != len(job.plan.stage_graph.devices):
            predicted_s = fewer(ranks)
            how = f"; planned anew for {ranks} device{'s' if ranks > 1 else ''}"
        record(f"step {step}: {failure}{how}")
        return job.plan, predicted_s

    copies = SpareCopies(devices, training.spare_copies)
    return Survival(copies, begin, replaces=training.replace)


def devices_left(job: Job) -> int:
    """Return the devices for ranks, where some may have gone since the plan was made.

    Under torchrun as many as there are ranks now; here GPUs may go, CPUs do not.
    """
    assert job.plan is not None
    if (ranks := torchrun.num_ranks()) is not None:
        return ranks
    planned = len(job.plan.stage_graph.devices)
    if job.device == CPU:
        return planned
    from anabranch.device import accelerator

    now = accelerator.count(job.device)
    lost, job.gpus = max((job.gpus or now) - now, 0), now
    return max(planned - lost, 1)


def first_step(training: TrainingSettings) -> int:
    """Return the steps that were done before the first attempt."""
    from anabranch.checkpoint import Checkpoint
    from anabranch.checkpoint.series import step_of

    if training.resume is None:
        return 0
    # The checkpoint may be gone by now, if newer ones were kept.
    step = step_of(training.resume)
    return Checkpoint(training.resume).progress.step if step is None else step


def left_of(training: TrainingSettings, first: int) -> TrainingSettings:
    """Settings of the rest of a run, from its newest checkpoint if ``--save-every`` has left one.

    Args:
        first: see ``first_step``.
    """
    from anabranch.checkpoint import Checkpoint

    if (last := training.newest_checkpoint()) is None:
        return training
    steps, done = training.last_step, Checkpoint(last).progress.step
    if steps is not None and done >= first + steps:
        raise TrainingError(f"{last} has all {steps} steps; what failed came behind them")
    left = None if steps is None else first + steps - done
    return replace(training, resume=last, weights=None, seed=None, steps=left)


def restarted(training: TrainingSettings) -> TrainingSettings:
    """Return the settings of the rest of a run whose ranks torchrun has started again."""
    if training.resume == training.save and training.steps is not None:
        raise TrainingError(
            f"torchrun has started training again, and {training.save} is both --resume and "
            "--save, so how many of --steps were done before cannot be told; name the checkpoint "
            "itself with --resume (step-N in that folder), or give --epochs"
        )
    return left_of(training, first_step(training))


def train_with_restarts(
    train: Callable[[TrainingSettings], Run],
    training: TrainingSettings,
    say: Callable[[str], None],
    out: Path | None = None,
) -> tuple[Run, TrainingSettings]:
    """Train on local ranks; where a rank fails, start them again, ``max_restarts`` times at most.

    Args:
        train: makes one attempt.
        say: called with a text on each restart.
        out: folder of the figures, if the user names one.

    Returns:
        The run, with the losses of the last attempt, and the settings of that attempt.
    """
    first, attempt = first_step(training), training
    for restarts in count():
        try:
            return replace(train(attempt), restarts=restarts), attempt
        except AnabranchError as failure:
            is_failed = isinstance(failure, StageFailedError)
            if not is_failed or restarts == training.max_restarts:
                # An error of the user's code, which has a traceback, would come again.
                is_death = is_failed and not getattr(failure, "__notes__", ())
                if how := how_after_failure(training, first, out, is_death=is_death):
                    failure.args = (f"{failure}; {how}",)
                raise
            try:
                attempt = left_of(training, first)
            except TrainingError as error:
                raise failure from error
            from_where = f"from {attempt.resume}" if attempt.resume else "from the beginning"
            many = f"restart {restarts + 1} of {training.max_restarts}"
            say(f"{failure}; {many}, {from_where}")
    raise AssertionError
