"""Ready callbacks: events as JSON lines, as rows of a table, and for trackers of experiments.

Nothing is opened before the first event, on the first rank, and each line is in the file before
training goes on. Lines are appended to a file that exists: a run that is resumed, or started again
after a failure, has its steps in the same file.
"""

from __future__ import annotations

import csv
import importlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from anabranch.errors import TrainingError
from anabranch.training.events import EndEvent, EvaluationEvent, Event, StepEvent


class JsonLines:
    """One JSON object per event, with its name as ``event``; numbers that are not finite are null.

    Args:
        path: a file, which is made or appended to.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)

    def __call__(self, event: Event) -> None:
        document = {"event": event.name, **_as_json(asdict(event))}
        document.pop("plan", None)  # the record of the run has it
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(document, allow_nan=False) + "\n")


def _as_json(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _as_json(item) for key, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value) if isinstance(value, Path) else value


_COLUMNS = ("event", "step", "epoch", "seconds", "samples", "learning_rate", "loss")


class Csv:
    """A row per step and per evaluation, in the same columns; missing values are empty.

    Columns are ``event``, ``step``, ``epoch``, ``seconds``, ``samples``, ``learning_rate``,
    ``loss`` and the metrics.

    Args:
        path: a file, which is made or appended to.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._columns: list[str] = []

    def __call__(self, event: Event) -> None:
        """Write one row.

        Raises:
            TrainingError: if the file has other columns.
        """
        if not isinstance(event, StepEvent | EvaluationEvent):
            return
        row = {name: getattr(event, name) for name in _COLUMNS[1:] if hasattr(event, name)}
        row |= {"event": event.name, **event.metrics}
        if not self._columns:
            self._begin([name for name in event.metrics if name != "loss"])
        with self._path.open("a", encoding="utf-8", newline="") as file:
            csv.DictWriter(file, self._columns, lineterminator="\n").writerow(row)

    def _begin(self, metrics: list[str]) -> None:
        columns = [*_COLUMNS, *metrics]
        with self._path.open("a+", encoding="utf-8", newline="") as file:
            file.seek(0)
            there = next(csv.reader(file), None)
            if there is None:
                csv.writer(file, lineterminator="\n").writerow(columns)
        if there is not None and there != columns:
            raise TrainingError(
                f"{self._path} has the columns {', '.join(there)}, and this run has "
                f"{', '.join(columns)}: it is a table of something else; name another file"
            )
        self._columns = columns


def scalars(event: Event) -> dict[str, float]:
    """Return the figures of an event by names that trackers group, such as ``train/loss``."""
    if isinstance(event, StepEvent):
        figures = {"loss": event.loss, **event.metrics}
        if event.seconds:
            figures["samples_per_s"] = event.samples / event.seconds
        if event.learning_rate is not None:
            figures["learning_rate"] = event.learning_rate
        return {f"train/{name}": value for name, value in figures.items()}
    if isinstance(event, EvaluationEvent):
        return {f"evaluation/{name}": value for name, value in event.metrics.items()}
    return {}


class TensorBoard:
    """Curves for TensorBoard, by ``torch.utils.tensorboard``; needs the package tensorboard.

    Args:
        folder: folder of its event files.

    Raises:
        TrainingError: if the package is not installed.
    """

    def __init__(self, folder: str | Path) -> None:
        self._make = _installed("torch.utils.tensorboard", "tensorboard").SummaryWriter
        self._folder, self._writer = folder, None

    def __call__(self, event: Event) -> None:
        # Made late: its thread would not exist in a forked rank.
        self._writer = writer = self._writer or self._make(str(self._folder))
        for name, value in scalars(event).items():
            writer.add_scalar(name, value, event.step)
        if not isinstance(event, StepEvent):
            writer.flush()
        if isinstance(event, EndEvent):
            writer.close()


class WeightsAndBiases:
    """Curves for Weights & Biases; needs the package wandb.

    Args:
        init: arguments of ``wandb.init``, such as ``project`` and ``config``.

    Raises:
        TrainingError: if the package is not installed.
    """

    def __init__(self, **init: Any) -> None:
        self._wandb = _installed("wandb", "wandb")
        self._init, self._run = init, None

    def __call__(self, event: Event) -> None:
        self._run = run = self._run or self._wandb.init(**self._init)
        # Evaluations come at the step of the loss before them.
        if figures := scalars(event):
            run.log(figures, step=event.step)
        if isinstance(event, EndEvent):
            run.finish()


class MLflow:
    """Curves for MLflow, stored as its environment variables say; needs the package mlflow.

    Args:
        experiment: name of the experiment; by default MLflow's own.
        run: arguments of ``mlflow.start_run``, such as ``run_name``.

    Raises:
        TrainingError: if the package is not installed.
    """

    def __init__(self, experiment: str | None = None, **run: Any) -> None:
        self._mlflow = _installed("mlflow", "mlflow")
        self._experiment, self._run, self._has_begun = experiment, run, False

    def __call__(self, event: Event) -> None:
        if not self._has_begun:
            self._has_begun = True
            if self._experiment is not None:
                self._mlflow.set_experiment(self._experiment)
            self._mlflow.start_run(**self._run)
        if figures := scalars(event):
            self._mlflow.log_metrics(figures, step=event.step)
        if isinstance(event, EndEvent):
            self._mlflow.end_run()


def _installed(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise TrainingError(
            f"figures are to go to {package}, but the package {package} cannot be imported here "
            f"({error}); pip install {package} installs it, and JsonLines and Csv (on "
            "the command line jsonl:FILE and csv:FILE) need nothing"
        ) from error
