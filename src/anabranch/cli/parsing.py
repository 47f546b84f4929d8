"""Parsing of the command line: counts, ``NAME=VALUE`` pairs, and the two meanings of ``-o``."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import typer

_T = TypeVar("_T")


def split_output(values: list[str] | None) -> tuple[dict[str, str], Path | None]:
    """Tell ``-o layers=8`` (an option of the model) from ``-o plan.json`` (a file)."""
    options: dict[str, str] = {}
    file: Path | None = None
    for value in values or []:
        key, equals, rest = value.partition("=")
        if equals and key.replace("-", "_").isidentifier():
            options[key.replace("-", "_")] = rest
        elif file is not None:
            raise typer.BadParameter(f"two output files: {file} and {value}")
        else:
            file = Path(value)
    return options, file


def named_values(values: list[str] | None, flag: str = "--planner-option") -> dict[str, object]:
    """Parse ``name=value`` pairs; true, false, none and numbers become Python's own."""
    words: dict[str, object] = {"true": True, "false": False, "none": None}
    options: dict[str, object] = {}
    for text in values or []:
        name, equals, value = text.partition("=")
        name = name.replace("-", "_")
        if not equals or not name:
            raise typer.BadParameter(f"{flag} {text}: write NAME=VALUE")
        if name in options:
            raise typer.BadParameter(f"{flag} {name} is given twice; leave out one")
        options[name] = words.get(value.lower(), _number(value))
    return options


def interval(text: str, flag: str) -> tuple[int | None, float | None]:
    """Parse steps (``200``) or a time (``90s``, ``10m``, ``2h``); return steps and seconds, of
    which one is None.
    """
    seconds = {"s": 1, "m": 60, "h": 3600}.get(text[-1:].lower())
    number = text if seconds is None else text[:-1]
    with suppress(ValueError):
        if seconds is None and int(number) > 0:
            return int(number), None
        if seconds is not None and 0 < float(number) < float("inf"):
            return None, float(number) * seconds
    raise typer.BadParameter(f"{flag} {text}: write steps, as 200, or time, as 90s, 10m or 2h")


def options_by_planner(
    values: list[str] | None, chosen: Sequence[str], known: Mapping[str, Mapping[str, str]]
) -> dict[str, dict[str, object]]:
    """Return {planner: {option: value}}. ``planner.name=value`` is for one planner and overrides
    ``name=value``, which is for all planners that have the option.

    Args:
        values: what the user wrote.
        chosen: the planners that are compared.
        known: {planner: its options}, of the planners compared.
    """
    by_planner: dict[str, dict[str, object]] = {name: {} for name in chosen}
    named = [(*key.rpartition(".")[::2], value) for key, value in named_values(values).items()]
    for scope, name, value in sorted(named, key=lambda item: item[0] != ""):
        # Planner names have dashes, which were taken for underscores.
        within = [p for p in chosen if not scope or p.replace("-", "_") == scope]
        having = [planner for planner in within if name in known[planner]]
        if not having:
            there = "; ".join(f"{p} has {', '.join(known[p]) or 'none'}" for p in within or chosen)
            what = f"{scope.replace('_', '-')}.{name}" if scope else name
            raise typer.BadParameter(
                f"--planner-option {what}: no planner compared has that option; {there}"
            )
        for planner in having:
            by_planner[planner][name] = value
    return {planner: options for planner, options in by_planner.items() if options}


def _number(text: str) -> float | str:
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text


def parse_counts(text: str) -> tuple[int, ...]:
    """Parse sample counts such as ``1,2,4,8``."""
    try:
        counts = tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        raise typer.BadParameter(f"--samples {text}: write whole numbers such as 1,2,4,8") from None
    if counts[0] < 1:
        raise typer.BadParameter(f"--samples {text}: sample counts start at 1")
    return counts


_EXAMPLES = {"model": "mmt", "cluster": "summit:8x4", "batch_size": "64"}
"""Example values of required arguments and options."""


def in_plain_words(error: typer.BadParameter) -> str:
    """Return the message for a refused value; one of a wrong type or size speaks as pydantic."""
    message = error.message.removeprefix("Value error, ")
    if not message.startswith("Input should be"):
        return message
    expected = message.removeprefix("Input should be").partition(", unable to parse")[0]
    unit = getattr(error.param, "metavar", None)  # STEPS or SECONDS
    counted = f", in {unit.lower()}" if unit else ""
    return f"it should be{expected.replace('valid integer', 'whole number')}{counted}"


def completed(verb: Any, missing: Any, arguments: Sequence[str]) -> str:
    """Return the help of a missing argument or option, with an example of the whole command.

    Args:
        verb: the command, whose parameters typer knows.
        missing: the parameter that is missing.
        arguments: words that the user wrote after the verb.
    """
    written, more = {text.partition("=")[0] for text in arguments}, []
    for parameter in verb.params:
        if parameter.required and parameter.name in _EXAMPLES:
            options = [name for name in parameter.opts if name.startswith("--")]
            if parameter is missing or (options and not {*options} & written):
                more.append(" ".join([*options, _EXAMPLES[parameter.name]]))
    summary = (missing.help or "").rstrip(".")
    if not more:
        return f"{summary}."
    command = " ".join([shlex.join(["anabranch", verb.name, *arguments]), *more])
    return f"{summary}; for example: {command}"


def usage(function: Callable[..., _T], *args: Any, **options: Any) -> _T:
    """Call a function with the user's values; its ValueError is wrong usage (exit code 2)."""
    try:
        return function(*args, **options)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
