"""Results of a run: its folder, its figures, the answers to Ctrl-C, and how to go on."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, TYPE_CHECKING, Any

from anabranch.cli.output import note, print_json, print_rows, say
from anabranch.cli.training.job import Job
from anabranch.cli.training.training_settings import TrainingSettings
from anabranch.errors import AnabranchError, FileFormatError

if TYPE_CHECKING:
    from anabranch.plans.plan import Plan
    from anabranch.record import Run
    from anabranch.training import Event


def keep_run(job: Job, run: Run, folder: Path, plan: Plan | None = None) -> Run:
    """Write the run's folder, with the prediction of its step; ``plan`` as it was executed."""
    from anabranch import solve
    from anabranch.record import Origin, StepPart, save_run

    run = replace(run, plan=plan or run.plan, origin=Origin.here())
    if job.profile is not None and run.predicted is not None:
        on = job.profile, job.cluster(len(run.plan.stage_graph.devices))
        if run.mode == "async":  # whose figures are of the full pipeline, not of the timeline
            timeline = solve.simulate(run.plan, *on)
        else:
            predicted, timeline = solve.foreseen(run.plan, *on)
            why = solve.explain(predicted, *on)
            parts = tuple(StepPart(*line) for line in why.parts())
            figures = replace(predicted.figures, limit=why.limit)
            run = replace(run, plan=replace(predicted, predicted=figures), parts=parts)
        run = replace(run, timelines=(("predicted", timeline), *run.timelines))
    save_run(run, folder)
    return run


class RunSoFar:
    """Record of a run so far, in a file that outlives the ranks: events and, after the last step,
    the run itself. The first rank calls it with each of them.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._begun: Run | None = None

    def begin(self, run: Run) -> None:
        """Forget an earlier attempt, and begin a run that has no steps yet."""
        self._begun = run
        self._file.seek(0)
        self._file.truncate()

    def __call__(self, made: Event | Run) -> None:
        with suppress(OSError):  # a full disk must not end training
            pickle.dump(made, self._file)

    def failed(self, failure: str) -> Run | None:
        """Return the run with a failure; None if no step was made."""
        from anabranch.record import Evaluation, Run
        from anabranch.record.run import finite
        from anabranch.training import EvaluationEvent, PlanEvent, StepEvent

        self._file.seek(0)
        made: list[Any] = []
        with suppress(EOFError, OSError, pickle.UnpicklingError):
            while True:
                made.append(pickle.load(self._file))
        steps = [event for event in made if isinstance(event, StepEvent)]
        changes = [event for event in made if isinstance(event, PlanEvent)]
        run = next((noted for noted in made if isinstance(noted, Run)), None)
        if run is None and steps and self._begun is not None:
            run = replace(
                self._begun,
                plan=changes[-1].plan if changes else self._begun.plan,
                plan_changes=tuple(f"step {event.step}: {event.why}" for event in changes),
                losses=tuple(event.loss for event in steps),
                # Without a flush the first ones have no seconds.
                step_s=tuple(event.seconds for event in steps if event.seconds),
                samples=tuple(event.samples for event in steps),
            )
        if run is None:
            return None
        evaluated = (event for event in made if isinstance(event, EvaluationEvent))
        evaluations = tuple(Evaluation(e.step, finite(e.metrics)) for e in evaluated)
        return replace(run, evaluations=evaluations, failure=failure)


@contextmanager
def keeping(keep: Callable[[Run], tuple[Run, Path]], save: Path | None) -> Iterator[RunSoFar]:
    """Yield a ``RunSoFar``; a run that fails is kept as far as it came.

    Args:
        keep: writes a run, and returns it with its folder.
        save: folder of its checkpoints.
    """
    with TemporaryFile(buffering=0) as file:
        so_far = RunSoFar(file)
        try:
            yield so_far
        except BaseException as error:
            if (run := so_far.failed(str(error) or "ended by Ctrl-C")) is not None:
                try:
                    note(_kept(run, keep(run)[1], save))
                except AnabranchError as unkept:
                    note(f"the record of this run is not complete: {unkept}")
            raise


def _kept(run: Run, folder: Path, save: Path | None) -> str:
    """Describe what is kept of a run that failed, and how to evaluate a model with all steps."""
    from anabranch.checkpoint import Checkpoint

    if not (count := len(run.losses)):
        return f"{folder} has this failure"
    steps = f"the {count:,} steps that were made" if count > 1 else "the step that was made"
    text = f"{folder} has the figures of {steps}, and this failure"
    with suppress(FileFormatError):  # writing the checkpoint may be what failed
        if save is not None and Checkpoint(save).progress.step == run.first_step + count:
            text += f"; {save} has the model: train with --resume {save} --steps 0 evaluates it"
    return text


def say_run(
    run: Run, folder: Path, facts: Mapping[str, Any], rows: Sequence[tuple[str, str]] = ()
) -> None:
    """Print the figures of a run; ``facts`` are added to the document, ``rows`` to the text."""
    from anabranch.record.figures import shown_figures

    page = folder / "report.html"
    print_json({**run.figures(), **facts, "run": folder, "report": page})
    print_rows([*((figure.name, figure.line) for figure in shown_figures(run.figures())), *rows])
    say(f"report: {page}")


def say_stopping() -> None:
    """Print the answer to the first Ctrl-C, below a line of progress that may be there."""
    line = "stopping after the step under way; Ctrl-C again stops at once\n"
    sys.stderr.write(("\n" if sys.stderr.isatty() else "") + line)
    sys.stderr.flush()


def say_stopped(save: Path | None) -> None:
    """Print the answer to the second Ctrl-C: which checkpoint there is."""
    there = "there is no checkpoint"
    if save is not None:
        from anabranch.checkpoint import MANIFEST, newest

        if last := save if (save / MANIFEST).exists() else newest(save):
            there = f"the checkpoint is {last}"
    sys.stderr.write(f"stopped at once; {there}\n")


def how_to_go_on(run: Run, training: TrainingSettings, out: Path | None) -> str:
    """Describe a run that was ended early, and how to go on; ``out`` is the user's ``--out``."""
    done, steps, save = len(run.losses), training.last_step, training.save
    counted = "step" if (steps or done) == 1 else "steps"
    if done == steps:
        return f"interrupted after the last of {steps} {counted}, before anything was evaluated"
    total = f" of {steps}" if steps is not None else ""
    text = f"interrupted after {done}{total} {counted}, with a loss of {run.losses[-1]:.4f} at last"
    if save is None:
        return f"{text}; there is no checkpoint, which --save FOLDER would have written"
    return f"{text}; to go on, {_same_command(training, save, done, out)}"


def how_after_failure(
    training: TrainingSettings, first: int, out: Path | None, *, is_death: bool
) -> str:
    """Describe how to go on after a failure, or the options that would have made that possible.

    Args:
        first: steps that were done before the run.
        out: the user's ``--out``.
        is_death: whether a rank died; otherwise the user has to mend an error first, and only a
            checkpoint with steps of this run is a way on.
    """
    from anabranch.checkpoint import Checkpoint

    save = training.save
    if save is not None and (last := training.newest_checkpoint()) is not None:
        done = Checkpoint(last).progress.step - first
        if done == training.last_step:
            return f"{last} is left, and has all steps"
        if is_death or done:
            return f"{last} is left: to go on, {_same_command(training, save, done, out)}"
    if training.max_restarts or training.survive or not is_death:
        return ""
    return (
        "there is no checkpoint to go on from; --save FOLDER --save-every 10m keeps some, for "
        "--resume, or with --max-restarts 3 for ranks that are started again at once; --survive "
        "goes on from copies in memory"
    )


def _same_command(training: TrainingSettings, save: Path, done: int, out: Path | None) -> str:
    """Describe how the command for the rest of a run differs from that of the run."""
    left, steps = [f"--resume {save}"], training.last_step
    if training.epochs is not None:
        left.append(f"--epochs {training.epochs}")
    if steps is not None:
        left.append(f"--steps {steps - done}")
    # Checkpoints of several steps go on in their folder.
    other = ["--save"] * (training.save_every is None) + ["--out"] * (out is not None)
    also = f" and another {' and '.join(other)}" if other else ""
    began = {"--weights": training.weights, "--seed": training.seed}
    if begun := [option for option, value in began.items() if value is not None]:
        also += f", without {' and '.join(begun)}"
    return f"the same command with {' '.join(left)}{also}"
