"""Sizes of built-in models: frozen dataclasses, changed by options such as ``-o layers=4``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

_T = TypeVar("_T")

_MAY_BE_ZERO = ("top_layers", "seed")


@dataclass(frozen=True)
class Sizes:
    """Base of every model's sizes; whole numbers are at least 1, except ``_MAY_BE_ZERO``."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if type(value) is int and value < 1 and field.name not in _MAY_BE_ZERO:
                raise ValueError(f"{field.name}={value}; at least 1 is needed")


def with_options(sizes: _T, options: Mapping[str, str], model: str) -> _T:
    """Return the sizes, a dataclass, with options, given as text, in place of some fields.

    Raises:
        ValueError: for a field that does not exist (the message lists them) or a value that
            does not parse.
    """
    present = {field.name: getattr(sizes, field.name) for field in fields(sizes)}  # type: ignore[arg-type]
    unknown = [key for key in options if key not in present]
    if unknown:
        allowed = ", ".join(f"{name}={value}" for name, value in present.items())
        raise ValueError(f"{model} has no option {', '.join(unknown)}; it has {allowed}")
    changed = {key: _parse(key, text, present[key]) for key, text in options.items()}
    return replace(sizes, **changed)  # type: ignore[type-var]


def _parse(key: str, text: str, old: Any) -> Any:
    """Parse a text as a value of the option's type, that of ``old``."""
    try:
        value = TypeAdapter(type(old)).validate_python(text)
    except ValidationError:
        wanted = {bool: "true or false", int: "a whole number", float: "a number"}[type(old)]
        raise ValueError(f"option {key}={text}: write {wanted}, such as {key}={old}") from None
    if isinstance(old, int | float) and not (math.isfinite(value) and value >= 0):
        raise ValueError(f"option {key}={text}: must be finite and not negative")
    return value
