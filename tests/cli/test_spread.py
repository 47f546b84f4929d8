"""Settings become options, and options settings again, with plain words for choices."""

import inspect
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Literal, get_args

import typer
from typer.testing import CliRunner

from anabranch.cli.settings import PlanningSettings
from anabranch.cli.spread import options_set, spread
from anabranch.cli.training.training_settings import FlushSettings
from anabranch.planner import PLANNERS
from anabranch.schedule import SCHEDULES
from anabranch.weights import OPTIMIZERS, POLICIES

Layer = StrEnum("Layer", ["thin", "thick"])


@dataclass(frozen=True)
class Paint:
    """Settings of one subject.

    Attributes:
        name: Thing that is painted.
        coats: How often it is painted, each time
            when it is dry.
    """

    name: Annotated[str, typer.Argument()]
    colour: Annotated[Literal["red", "blue"], typer.Option("--color")] = "red"
    layers: Annotated[list[Layer] | None, typer.Option()] = None
    coats: Annotated[int, typer.Option(min=1)] = 1


@spread
def paint(paint: Paint, dry: Annotated[bool, typer.Option("--dry")] = False) -> None:
    """Paint something.

    Args:
        dry: Only say so.
    """
    typer.echo(f"{paint} {dry}")


def call(*arguments: str) -> str:
    """What the verb says."""
    app = typer.Typer()
    app.command()(paint)
    return CliRunner().invoke(app, arguments).output


def test_help_says_why_it_is_empty():
    """Python leaves out docstrings under -OO."""

    @spread
    def verb() -> None:
        pass

    assert verb.__doc__ == "Help texts are left out by python -OO; python -O has them."


def test_every_field_is_an_option():
    """Named and typed as in the settings, which the verb gets whole."""
    said = call("fence", "--color", "blue", "--layers", "thin", "--layers", "thick", "--dry")
    layers = ["thin", "thick"]
    assert said == f"{Paint('fence', 'blue', layers, 1)} True\n"
    assert "Paint(name='fence', colour='red'" in call("fence")


def test_help_is_that_of_the_docstrings():
    """Of settings and of the verb, whose own help ends before its arguments."""
    said = " ".join(call("--help").replace("│", " ").split())
    for text in ("Thing that is painted.", "each time when it is dry.", "Only say so."):
        assert text in said
    assert paint.__doc__ == "Paint something."


def test_a_choice_that_does_not_exist_is_refused():
    """With those that do."""
    said = " ".join(call("fence", "--color", "green").replace("│", " ").split())
    assert "'green' is not one of 'red', 'blue'" in said


def test_given_is_what_differs_from_the_defaults():
    """By the names that the user writes."""
    assert options_set(Paint("fence", colour="blue", coats=2)) == {"--color": "blue", "--coats": 2}
    assert options_set(FlushSettings(round_robin=True, policy_option=[])) == {"round-robin": True}


def test_choices_are_those_of_the_tables():
    """A new planner, schedule, policy or optimizer is an option without another word."""
    from anabranch.cli.verbs.plan import plan

    options = inspect.signature(plan).parameters

    def choices(name: str) -> set[str]:
        types = typer.main.get_params_from_function(plan)[name].annotation
        kinds = [kind for kind in get_args(types) if kind is not type(None)]
        return set(kinds if isinstance(kinds[0], str) else get_args(kinds[0]))

    assert options["planner"].default == "auto"
    assert choices("planner") == set(PLANNERS)
    assert choices("schedule") == {"auto", "published", *SCHEDULES}
    assert choices("policy") == {"auto", *POLICIES}
    assert choices("optimizer") == set(OPTIMIZERS)
    assert PlanningSettings("local:2", 8).mode == "sync"
