"""A file that says what the command line can."""

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from anabranch.cli.parsing import split_output
from anabranch.cli.spread import spread
from anabranch.cli.training.training_settings import (
    ComputeSettings,
    RunSettings,
    TrainedPlanSettings,
    TrainingSettings,
)

FILE = """
model = "two-branch"
steps = 7
save_every = 200
save = "run"
precision = "bf16"
check-gradients = false
log = ["jsonl:a", "csv:b"]
plan = "plan.json"

[options]
layers = 8
tied = true
"""


def parsed(tmp_path: Path, text: str, *arguments: str) -> tuple[int, str, list[object]]:
    """What a verb with the settings of training gets from a file and a command line."""
    seen: list[object] = []

    @spread
    def verb(
        model: RunSettings,
        local: TrainedPlanSettings,
        training: TrainingSettings,
        compute: ComputeSettings,
    ) -> None:
        seen.extend((model, local, training, compute))

    app = typer.Typer()
    app.command()(verb)
    (tmp_path / "run.toml").write_text(text)
    result = CliRunner().invoke(app, [str(tmp_path / "run.toml"), *arguments])
    said = " ".join(result.output.replace("│", "").split())  # lines wrap by the path's length
    return result.exit_code, said or str(result.exception), seen


def test_keys_are_options_and_the_command_line_goes_before(tmp_path: Path):
    """Numbers, texts, switches, lists and the model's options; with dashes or underscores."""
    code, said, seen = parsed(tmp_path, FILE, "--steps", "9", "--log", "csv:c")
    assert code == 0, said
    model, local, training, compute = seen
    assert model.model == "two-branch"
    assert split_output(model.output) == ({"layers": "8", "tied": "true"}, None)
    assert local.plan_file == Path("plan.json")
    assert (training.steps, training.save_every, training.save) == (9, "200", Path("run"))
    assert training.check_gradients is False
    assert training.log == ["csv:c"]
    assert compute.precision == "bf16"
    _, _, seen = parsed(tmp_path, FILE)
    assert (seen[2].steps, seen[2].log) == (7, ["jsonl:a", "csv:b"])


def test_a_run_goes_on_by_the_file_that_it_began_with(tmp_path: Path):
    """By the command that its last line says; only the file itself cannot begin in two ways."""
    began = 'model = "two-branch"\nseed = 5\nweights = "bert"\n'
    _, _, seen = parsed(tmp_path, began)
    assert (seen[2].seed, seen[2].weights) == (5, Path("bert"))
    code, said, seen = parsed(tmp_path, began, "--resume", "run")
    assert code == 0, said
    assert (seen[2].seed, seen[2].weights, seen[2].resume) == (None, None, Path("run"))
    _, _, seen = parsed(tmp_path, f'{began}resume = "run"\n')
    assert (seen[2].seed, seen[2].resume) == (5, Path("run")), "which is refused"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('model = "m"\nstep = 7', "there is no option 'step' (is steps meant?)"),
        ('model = "m"\nzzzz = 7', "there is no option 'zzzz'; keys are accumulate, "),
        ("steps = 7", "names no model"),
        ('model = "m"\nsave-every = 1\nsave_every = 2', "save_every is there twice"),
        ('model = "m"\n[training]\nsteps = 7', "training is a table"),
        ('model = "m"\nsteps = true', "steps is no switch, so it cannot be true"),
        ('model = "m"\nlog = "csv:a"', 'so it is a list: ["csv:a"]'),
        ('model = "m"\nsteps = "many"', "steps = 'many': it should be a whole number"),
        ('model = "m"\nprecision = "fp8"', "'fp8' is not one of"),
        ("model = ", "is no TOML file"),
        ("model = mymodel:workload", 'texts stand in quotes: model = "mymodel:workload"'),
    ],
)
def test_what_is_no_option_is_named(tmp_path: Path, text: str, message: str):
    """With the key that may be meant; values are checked as those of the command line."""
    code, said, seen = parsed(tmp_path, text)
    assert code != 0
    assert message in said
    assert seen == []


def test_a_file_that_is_not_there(run):
    code, _, err = run("train", "none.toml")
    assert code == 1
    assert "none.toml cannot be read: No such file or directory" in err


@pytest.mark.parametrize("text", ["model = 'none:none'", "model = 'm'\nstep = 7"])
def test_mistakes_of_a_file_that_asks_for_json_are_documents(run, text: str):
    """Whatever is wrong with it: programs read standard output alone."""
    Path("run.toml").write_text(f"json = true\n{text}")
    code, out, _ = run("train", "run.toml")
    assert code == 2
    assert json.loads(out)["error"] == "UsageError"
