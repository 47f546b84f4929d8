"""Settings as parameters of verbs: each of their fields becomes one option.

A verb takes settings of a few subjects and its own options. typer reads one parameter per option::

    def verify(model: ModelSettings, local: LocalPlanSettings)
    --> anabranch verify MODEL --preset ... --granularity ... --plan ... --devices ... --json

Help is read from the docstrings, where the annotation has none: from ``Attributes`` of settings,
and from ``Args``, the last section, of a verb. ``Settings`` has the help of common options.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from functools import cache, wraps
from inspect import Parameter
from typing import Annotated, Any, get_args, get_type_hints

import typer
from typer.models import OptionInfo, ParameterInfo

from anabranch.cli.output import answering

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]


@dataclass(frozen=True)
class Settings:
    """Settings of one subject, with the help of options that several settings and verbs have.

    Attributes:
        max_replicas: At most this many data-parallel replicas per stage.
        microbatch_size: Fix the micro-batch size; by default it is searched.
        no_cache: Capture the model again and keep nothing, even if an earlier capture was kept.
        no_calibration: Predict local:N as if this machine had not been calibrated.
        optimizer: With --mode async: the optimizer of the training to come. The weight policy that
            auto chooses and the predicted copies of the weights depend on it [default: the model's
            own; a profile file has none].
        policy: With --mode async: the weight policy, that is which weights forwards and backwards
            read; auto chooses again [default: the plan's; auto if it has none].
        precision: Time and memory under autocast to bf16 or fp16; training by the plan uses the
            same autocast [default: fp32, or the profile file's].
        rewrite: Rewrites to apply to the model; plan --rewrite can choose them [default: none].
        run: Where to keep figures and report [default: runs/MODEL-TIME].
        schedule: auto lets the simulator choose; published is the schedule of the planner's paper.
        shape: For planner auto: stages as a graph (the default) or as a chain, in one row.
    """


def spread(verb: Callable[..., None]) -> Callable[..., None]:
    """Return the verb as typer reads it: a parameter per field of its settings, and --json."""
    hints = get_type_hints(verb, include_extras=True)
    about, own = _documented(verb, "Args")
    helps = _documented(Settings, "Attributes")[1] | own
    settings: dict[str, Any] = {}
    parameters: list[Parameter] = []
    for name, parameter in inspect.signature(verb).parameters.items():
        kind = hints[name]
        if is_dataclass(kind):
            settings[name] = kind
            for field, type_ in _options(kind):
                default = Parameter.empty if field.default is MISSING else field.default
                how = {"default": default, "annotation": type_}
                parameters.append(Parameter(field.name, Parameter.KEYWORD_ONLY, **how))
        else:
            type_ = _with_help(kind, helps.get(name))
            parameters.append(parameter.replace(kind=Parameter.KEYWORD_ONLY, annotation=type_))

    how = {"default": False, "annotation": AsJson}
    parameters.append(Parameter("as_json", Parameter.KEYWORD_ONLY, **how))

    @wraps(verb)
    def call(*, as_json: bool, **options: Any) -> None:
        # In lists typer takes choices as enumerations, whose members are texts.
        values = {n: [*map(str, v)] if isinstance(v, list) else v for n, v in options.items()}
        made = {
            name: kind(**{field.name: values.pop(field.name) for field in fields(kind)})
            for name, kind in settings.items()
        }
        with answering(as_json=as_json):
            verb(**made, **values)

    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {}
    call.__doc__ = about.replace("\n- ", "\n\n- ").replace("\n  ", "\n").replace("`", "")
    return call


def options_set(settings: Any) -> dict[str, Any]:
    """Return option as it is written -> value, for fields that differ from their defaults."""
    values = {}
    for field, type_ in _options(type(settings)):
        value = getattr(settings, field.name)
        (info,) = (part for part in get_args(type_)[1:] if isinstance(part, ParameterInfo))
        if isinstance(info, OptionInfo) and value not in (field.default, [], ()):
            name = info.default if isinstance(info.default, str) else None
            name = name or "--" + field.name.replace("_", "-")
            values[name.removeprefix("--") if info.hidden else name] = value
    return values


def _options(kind: Any) -> list[tuple[Field[Any], Any]]:
    """Return the fields of settings, each with its annotation and help."""
    hints = get_type_hints(kind, include_extras=True)
    helps: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        helps |= _documented(base, "Attributes")[1]
    return [(f, _with_help(hints[f.name], helps.get(f.name, ""))) for f in fields(kind)]


def _with_help(type_: Any, text: str | None) -> Any:
    """Return an annotation with the help of an option; help of its own takes precedence."""
    if text is None:
        return type_
    known = [part for part in get_args(type_) if isinstance(part, ParameterInfo)]
    info = copy.copy(known[0]) if known else OptionInfo(default=...)
    info.help = info.help or text
    return Annotated[type_.__origin__ if known else type_, info]


_NO_HELP = "Help texts are left out by python -OO; python -O has them."
"""Help of a verb where Python keeps no docstrings."""


@cache  # most settings are of several verbs
def _documented(target: Any, section: str) -> tuple[str, dict[str, str]]:
    """Return the docstring before a section, and the entries of the section by their names."""
    about, _, rest = (inspect.getdoc(target) or _NO_HELP).partition(f"\n\n{section}:\n")
    entries = re.findall(r"^    (\w+): (.*(?:\n     .*)*)", rest.partition("\n\n")[0], re.MULTILINE)
    return about, {name: " ".join(text.split()) for name, text in entries}
