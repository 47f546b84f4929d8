"""A file that says what a command line can say: ``anabranch train run.toml --steps 50``.

::

    model = "two-branch"
    devices = 4
    save-every = "10m"
    log = ["jsonl:run.jsonl"]

    [options]               # of the model, as -o layers=8
    layers = 8

Keys are the options of the verb without their dashes, checked by the same rules. Options on the
command line take precedence. A model that is a function of the user is imported only if the command
line says ``--trust``.
"""

from __future__ import annotations

import shlex
import tomllib
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import typer

from anabranch.cli.parsing import in_plain_words
from anabranch.cli.source import model_in_file
from anabranch.errors import FileFormatError, suggestion

_MODEL, _OPTIONS = "model", "options"
_RUN_FILE = "anabranch.run_file"
"""Key of ``context.meta``, for the run file that is read and the model in it."""


def model_or_file(context: typer.Context, model: str) -> str:
    """Return the model that the user names, or the file's, whose other keys become defaults."""
    if not model.endswith(".toml") or context.resilient_parsing:
        return model
    path = Path(model)
    document = _read(path)
    known = _known(context)
    defaults: dict[str, Any] = {}
    for key, value in document.items():
        name = key.replace("_", "-")
        if name == _OPTIONS and isinstance(value, dict):
            defaults["output"] = [f"{option}={_text(setting)}" for option, setting in value.items()]
        elif name == _OPTIONS or isinstance(value, dict):
            raise typer.BadParameter(
                f"{path}: {key} is {'no table' if name == _OPTIONS else 'a table'}; only the "
                f"options of the model are one, [{_OPTIONS}]"
            )
        elif name not in known:
            keys = [*known, _OPTIONS]
            hint = suggestion(name, keys) or f"; keys are {', '.join(sorted(keys))}"
            raise typer.BadParameter(f"{path}: there is no option {key!r}{hint}")
        elif known[name].name in defaults:
            raise typer.BadParameter(f"{path}: {key} is there twice, once with an underscore")
        else:
            if why := _why_not(known[name], value):
                raise typer.BadParameter(f"{path}: {key} {why}")
            # A callback that looks at folders runs only once, with the default.
            if known[name].callback is None or known[name].hidden:
                try:  # by the rules of the command line, which would not name the file
                    known[name].process_value(context, value)
                except typer.BadParameter as error:
                    message = f"{path}: {key} = {value!r}: {in_plain_words(error)}"
                    raise typer.BadParameter(message) from error
            defaults[str(known[name].name)] = value
    named = defaults.pop(_MODEL, None)
    if not isinstance(named, str):
        raise typer.BadParameter(f'{path} names no model; write model = "mymodel:workload"')
    context.default_map = {**(context.default_map or {}), **defaults}
    context.meta[_RUN_FILE] = path, named
    return named


def in_file(*names: str, **more: Any) -> Any:
    """A setting that only a run file has: a key, and no option of the command line."""
    return typer.Option(*names, hidden=True, callback=_refuse_option, **more)


def _is_typed(context: typer.Context, name: str) -> bool:
    return getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"


def _refuse_option(context: typer.Context, parameter: typer.CallbackParam, value: Any) -> Any:
    if _is_typed(context, str(parameter.name)):
        key = str(parameter.name).replace("_", "-")
        raise typer.BadParameter(
            f"{key} is a key of a run file, no option: write model = ... and {key} = ... to "
            "run.toml, and anabranch train run.toml"
        )
    return value


def require_trust(context: typer.Context, trust: bool) -> bool:
    """Accept a run file whose model is no function, or is trusted; callback of ``--trust``."""
    if not trust and _RUN_FILE in context.meta:
        path, model = context.meta[_RUN_FILE]
        model_in_file(
            model, path, f"add --trust ({shlex.join(['anabranch', 'train', str(path), '--trust'])})"
        )
    return trust


def refuse_beside_plan(context: typer.Context, plan: Path | None) -> Path | None:
    """Refuse keys of the run file that a plan file decides; callback of ``--plan``."""
    decided = {"devices", "batch_size", "microbatch_size", "schedule"}
    keys = [key.replace("_", "-") for key in context.default_map or {} if key in decided]
    if plan is not None and keys and _RUN_FILE in context.meta:
        raise typer.BadParameter(
            f"{plan} decides what {', '.join(keys)} in {context.meta[_RUN_FILE][0]} would; leave "
            "out one of them"
        )
    return plan


def go_on(context: typer.Context, resume: Path | None) -> Path | None:
    """Drop weights and seed of a run file where the user types ``--resume``; its callback."""
    if _is_typed(context, "resume"):
        context.default_map = {**(context.default_map or {}), "weights": None, "seed": None}
    return resume


def asks_for_json(arguments: Iterable[str]) -> bool:
    """Return True if a command line or its run file asks for JSON, before either is checked."""
    for argument in arguments:
        if argument == "--json":
            return True
        if argument.endswith(".toml"):
            with suppress(FileFormatError):
                if _read(Path(argument)).get("json") is True:
                    return True
    return False


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise FileFormatError(f"{path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        form = 'each line is key = value, and texts stand in quotes: model = "mymodel:workload"'
        raise FileFormatError(f"{path} is no TOML file: {error}; {form}") from error


def _known(context: typer.Context) -> dict[str, Any]:
    """Return key -> parameter, for all keys that a run file of the verb may have."""
    known = {}
    for parameter in context.command.params:
        for option in (_MODEL,) if parameter.name == _MODEL else parameter.opts:
            if parameter.name not in (None, "help", "output", "trust"):
                known[option.removeprefix("--")] = parameter
    return known


def _why_not(parameter: Any, value: Any) -> str:
    """Return why a value is refused that would be misread, ``true`` as 1 or a text as its letters;
    empty for other values, which are checked as on the command line.
    """
    if isinstance(value, bool) and not getattr(parameter, "is_flag", False):
        return f"is no switch, so it cannot be {_text(value)}; leave it out, or give it a value"
    if getattr(parameter, "multiple", False) and not isinstance(value, list):
        return f'may be there several times, so it is a list: ["{value}"]'
    return ""


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
