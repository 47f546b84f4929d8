"""Methods that remember their results, as ``functools.cached_property`` does for properties."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

_Owner = TypeVar("_Owner")
_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def remembered(
    method: Callable[Concatenate[_Owner, _Arguments], _Result],
) -> Callable[Concatenate[_Owner, _Arguments], _Result]:
    """Compute the result of a method once per object and arguments, which are hashable.

    Results live as long as the object, which may not have slots; a copy made by
    ``dataclasses.replace`` has none yet. What raises is not remembered.
    """
    place = f"_remembered_{method.__name__}"

    @wraps(method)
    def ask(self: _Owner, /, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        known: dict[Hashable, Any] = self.__dict__.setdefault(place, {})
        key = (args, *kwargs.items()) if kwargs else args
        if key not in known:
            known[key] = method(self, *args, **kwargs)
        result: _Result = known[key]
        return result

    return ask
