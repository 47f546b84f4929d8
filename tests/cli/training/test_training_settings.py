"""Where figures of training go."""

import csv
import json
from pathlib import Path

import pytest
import typer

from anabranch.checkpoint.series import checkpoints
from anabranch.cli.training.training_settings import TrainingSettings
from anabranch.errors import OutputError
from anabranch.training import Csv, JsonLines
from tests.cli.examples import TOWERS, by_hand

PLAN = by_hand([("left right", [0]), ("head", [1])], 4)


def test_a_log_is_a_kind_and_a_place(tmp_path: Path):
    """Nothing is opened before the first event."""
    made = TrainingSettings(log=[f"jsonl:{tmp_path}/a:b.jsonl", f"csv:{tmp_path}/c.csv"]).loggers()
    assert [type(log) for log in made] == [JsonLines, Csv]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [("json:log", "is jsonl meant"), ("csv", "say where, csv:FILE"), ("paper:x", "no log 'paper'")],
)
def test_wrong_words_are_usage(text: str, message: str):
    with pytest.raises(typer.BadParameter, match=message):
        TrainingSettings(log=[text]).loggers()


def test_what_could_not_be_written_is_refused(tmp_path: Path):
    """A file in no folder, a folder where a file should be, and the other way round."""
    (tmp_path / "file").touch()
    for text, message in [
        (f"jsonl:{tmp_path}/none/log", "there is no folder"),
        (f"csv:{tmp_path}", "is a folder"),
        (f"tensorboard:{tmp_path / 'file'}", "is a file"),
    ]:
        with pytest.raises(OutputError, match=message):
            TrainingSettings(log=[text]).loggers()


@pytest.mark.dist
def test_a_run_is_logged_evaluated_and_its_best_checkpoint_kept(document, run_file, tmp_path: Path):
    """From the command line to the files: losses in the table are those of the run."""
    (tmp_path / "plan.json").write_text(json.dumps(PLAN))
    found = document(
        "train", *run_file(TOWERS, keep_best="error:min"), "--plan", "plan.json", "--steps", "6",
        "--evaluate-every", "2", "--save", "run",
        "--log", "jsonl:log.jsonl", "--log", "csv:log.csv",
    )  # fmt: skip
    events = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    evaluated = [e for e in events if e["event"] == "evaluation"]
    assert [e["step"] for e in evaluated] == [2, 4, 6]
    best = min(evaluated, key=lambda e: e["metrics"]["error"])["step"]
    assert (tmp_path / "run" / "best").resolve().name == f"step-{best}"
    assert checkpoints(tmp_path / "run")[-1][0] == 6
    assert evaluated[-1]["metrics"] == found["metrics"]
    with (tmp_path / "log.csv").open() as file:
        losses = [float(row["loss"]) for row in csv.DictReader(file) if row["event"] == "step"]
    assert losses == found["losses"]


def test_a_metric_that_the_model_lacks_is_refused_before_it_is_measured(run, run_file, monkeypatch):
    """With those that it has."""
    monkeypatch.setattr("anabranch.cli.training.job.Job.measure", None)
    best = run_file(TOWERS, evaluate_every=2, keep_best="acuracy:max", save="run")
    code, _, err = run("train", *best, "--devices", "2")
    assert code == 1
    assert "asked for by acuracy, but the held-out means of this model are loss, error" in err


def test_the_length_of_a_run_in_words():
    """Both ends are told, since the first one counts; ``more`` where steps were made before."""
    assert TrainingSettings(steps=60, epochs=1).length == "for 60 steps or until 1 epoch is done"
    resumed = TrainingSettings(steps=60, epochs=2, resume=Path("run"))
    assert resumed.length == "for 60 more steps or until 2 epochs are done"
