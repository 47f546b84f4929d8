"""Ready callbacks, on events by hand."""

import builtins
import csv
import json
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from anabranch.errors import TrainingError
from anabranch.training import (
    CheckpointEvent,
    Csv,
    EndEvent,
    EvaluationEvent,
    Event,
    JsonLines,
    MLflow,
    StepEvent,
    TensorBoard,
    WeightsAndBiases,
)

EVENTS: list[Event] = [
    StepEvent(41, 1, 2, 0, 2.0, {"error": 1.5}, 0.25, 8, 0.1),
    EvaluationEvent(41, {"loss": 1.0, "error": math.inf}, 3.0, True),
    CheckpointEvent(41, Path("run/step-41")),
    StepEvent(42, 2, 2, 1, 1.0, {"error": 0.5}, 0.0, 4),
    EndEvent(42, {"loss": 0.5, "error": 0.25}, False),
]


def test_json_lines_have_every_event(tmp_path: Path):
    """By its name; a number that is none is null. Lines are there before the file is closed, and
    another run goes on behind them.
    """
    path = tmp_path / "log.jsonl"
    log = JsonLines(path)
    for event in EVENTS:
        log(event)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["event"] for line in lines] == ["step", "evaluation", "checkpoint", "step", "end"]
    assert lines[0] == {
        "event": "step", "step": 41, "done": 1, "total": 2, "epoch": 0, "loss": 2.0,
        "metrics": {"error": 1.5}, "seconds": 0.25, "samples": 8, "learning_rate": 0.1,
    }  # fmt: skip
    assert lines[1]["metrics"] == {"loss": 1.0, "error": None}
    assert lines[2]["folder"] == "run/step-41"
    JsonLines(path)(EVENTS[-1])
    assert len(path.read_text().splitlines()) == 6


def test_a_table_has_steps_and_evaluations(tmp_path: Path):
    """In the same columns; another run of the same model goes on without a second header, one of
    another model is refused.
    """
    path = tmp_path / "log.csv"
    first, again = Csv(path), Csv(path)
    for event in EVENTS[:3]:
        first(event)
    for event in EVENTS[3:]:
        again(event)
    with path.open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["event"], row["step"], row["loss"]) for row in rows] == [
        ("step", "41", "2.0"), ("evaluation", "41", "1.0"), ("step", "42", "1.0"),
    ]  # fmt: skip
    assert [row["epoch"] for row in rows] == ["0", "", "1"]
    assert [row["learning_rate"] for row in rows] == ["0.1", "", ""]
    with pytest.raises(TrainingError, match="is a table of something else"):
        Csv(path)(StepEvent(1, 1, 2, 0, 2.0, {"accuracy": 1.0}, 0.25, 8))


class Calls:
    """Notes what is called, with the arguments as they were written."""

    def __init__(self) -> None:
        self.made: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **options: Any) -> Calls:
            self.made.append((name, *args, *options.items()))
            return self

        return call


STEP_41 = {
    "train/loss": 2.0, "train/error": 1.5, "train/samples_per_s": 32.0, "train/learning_rate": 0.1,
}  # fmt: skip
STEP_42 = {"train/loss": 1.0, "train/error": 0.5}
HELD_OUT = {"evaluation/loss": 1.0, "evaluation/error": math.inf}


@pytest.mark.parametrize(
    ("module", "make", "begin", "log", "end"),
    [
        (
            "wandb",
            lambda: WeightsAndBiases(project="towers"),
            [("init", ("project", "towers"))],
            *("log", "finish"),
        ),
        (
            "mlflow",
            lambda: MLflow("towers", run_name="first"),
            [("set_experiment", "towers"), ("start_run", ("run_name", "first"))],
            *("log_metrics", "end_run"),
        ),
    ],
)
def test_services_get_figures_by_step(monkeypatch, module, make, begin, log, end):
    calls = Calls()
    monkeypatch.setitem(sys.modules, module, calls)
    logger = make()
    for event in EVENTS:
        logger(event)
    figures = [(STEP_41, 41), (HELD_OUT, 41), (STEP_42, 42)]
    assert calls.made == [*begin, *((log, found, ("step", n)) for found, n in figures), (end,)]


def test_tensorboard_gets_one_curve_per_figure(monkeypatch, tmp_path: Path):
    """Written out where training pauses, closed in the end."""
    calls = Calls()
    module = ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = lambda folder: calls.SummaryWriter(folder)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    log = TensorBoard(tmp_path)
    assert calls.made == []
    for event in EVENTS:
        log(event)
    assert calls.made[0] == ("SummaryWriter", str(tmp_path))
    curves = [call[1:] for call in calls.made if call[0] == "add_scalar"]
    expected = [(STEP_41, 41), (HELD_OUT, 41), (STEP_42, 42)]
    assert curves == [(k, v, step) for figures, step in expected for k, v in figures.items()]
    assert calls.made[-2:] == [("flush",), ("close",)]


@pytest.mark.parametrize(
    ("make", "package"),
    [(lambda: TensorBoard("t"), "tensorboard"), (WeightsAndBiases, "wandb"), (MLflow, "mlflow")],
)
def test_a_missing_package_is_one_paragraph(monkeypatch, make, package):
    """When the callback is made, not at the first step, and with what would install it."""
    real = builtins.__import__

    def without(name: str, *args: Any, **options: Any) -> Any:
        if name.partition(".")[0] == package:
            raise ModuleNotFoundError(f"No module named {package!r}")
        return real(name, *args, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    with pytest.raises(TrainingError, match=f"pip install {package} installs it"):
        make()
