"""Names of models: built-in ones, and functions of the user's own that return a Workload."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from anabranch import models
from anabranch.errors import WorkloadError, naming_line, suggestion
from anabranch.workload import Workload, to_meta, with_article


def resolve(
    text: str,
    *,
    preset: str = "published",
    options: Mapping[str, str] | None = None,
    meta: bool = False,
) -> Workload:
    """Return the workload that ``text`` names.

    Args:
        text: a built-in model, or ``package.module:function``, where the module may lie in the
            current directory and the function returns a ``Workload``, or ``file.py:function``.
        preset: preset of a built-in model; also passed to a function with an argument of that name.
        options: options of a built-in model; a function gets them as keyword arguments, as text.
        meta: build the module without memory for its parameters, for planning only.

    Raises:
        ValueError: if nothing has that name, an option is unknown, or a function returns no
            ``Workload``.
        WorkloadError: if the module or the function raises; names the line in the user's code, and
            has the exception as its cause. Errors of this package stay what they are.
    """
    if ":" in text:
        return _from_function(text, preset, dict(options or {}), meta)
    return models.build(text, preset=preset, options=options, meta=meta)


def _from_function(text: str, preset: str, options: dict[str, str], meta: bool) -> Workload:
    """Import, call and check a user's function."""
    function = _find_function(text)
    signature = inspect.signature(function)
    if "preset" in signature.parameters:
        options.setdefault("preset", preset)
    try:
        signature.bind(**options)
    except TypeError as error:
        names = ", ".join(signature.parameters) or "none"
        raise ValueError(
            f"{text}: {error}; its arguments are {names}, and -o NAME=VALUE gives one a value"
        ) from None
    called = ", ".join(f"{name}={value!r}" for name, value in options.items())
    with naming_line(f"{text}{called and f'({called})'} raised"):
        try:
            with _parameters_on_meta() if meta else nullcontext():
                workload = function(**options)
        except (RuntimeError, TypeError) as error:
            if not meta or "meta" not in str(error):
                raise
            workload = function(**options)  # it reads values of its parameters
    if not isinstance(workload, Workload):
        raise ValueError(
            f"{text} returned {with_article(type(workload).__name__)}, not an anabranch.Workload; "
            f"end it with return anabranch.Workload(module=..., example=...)"
        )
    if meta:
        example = to_meta(workload.example)
        workload = replace(workload, module=workload.module.to("meta"), example=example)
    return workload if workload.name else replace(workload, name=text)


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Free the memory of parameters as modules register them, one at a time.

    Not ``torch.device("meta")``: under it a function that draws its example from a generator fails.
    """

    def drop(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta:
            return None  # unchanged, so that tied parameters stay one
        return nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)

    # The result of a hook replaces the parameter; PyTorch's annotation leaves that out.
    handle = register_module_parameter_registration_hook(drop)  # type: ignore[arg-type]
    try:
        yield
    finally:
        handle.remove()


def _find_function(text: str) -> Callable[..., object]:
    """Import the function of ``package.module:function`` or ``file.py:function``."""
    place, _, attribute = text.partition(":")
    here = os.getcwd()
    if place.endswith(".py"):  # a file, as completed in a shell
        file = Path(place).absolute()
        here, place = str(file.parent), file.stem
    if not all(part.isidentifier() for part in [*place.split("."), *attribute.split(".")]):
        raise ValueError(f"{text} is not of the form package.module:function or file.py:function")
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        with naming_line(f"{text} cannot be had, because importing {place} raised"):
            function: object = importlib.import_module(place)
    except WorkloadError as error:
        # A module that exists may lack one of its own imports: another error.
        missing = error.__cause__.name if isinstance(error.__cause__, ModuleNotFoundError) else None
        if missing is None or not f"{place}.".startswith(f"{missing}."):
            raise
        raise ValueError(
            f"there is no module {missing} for {text}; it is looked for in {here} and among the "
            "installed packages"
        ) from None
    for name in attribute.split("."):
        if not hasattr(function, name):
            others = [
                key
                for key, value in vars(function).items()
                if inspect.isfunction(value) and value.__module__ == place and key[0] != "_"
            ]
            raise ValueError(
                f"{place} has no {attribute}{suggestion(name, others)}; its functions are "
                f"{', '.join(others) or 'none'}"
            )
        function = getattr(function, name)
    if not callable(function) or not _may_make_workload(function):
        kind = with_article(type(function).__name__) + " of Python itself" * callable(function)
        raise ValueError(
            f"{text} is {'a class' if inspect.isclass(function) else kind}, not a function of "
            "yours; write a function without required arguments that returns an anabranch.Workload"
        )
    return function


def _may_make_workload(function: object) -> bool:
    """Return True for Python code outside of the standard library, unlike ``os:system``."""
    while isinstance(function, partial) or hasattr(function, "__wrapped__"):
        function = function.func if isinstance(function, partial) else function.__wrapped__
    if inspect.isclass(function):
        return issubclass(function, Workload)
    if not inspect.isroutine(function):
        function = type(function).__call__
    code = getattr(function, "__code__", None)
    if code is None or code.co_filename.startswith("<"):  # compiled, or frozen into Python
        return False
    standard = Path(sysconfig.get_path("stdlib"))
    file = Path(code.co_filename).resolve()
    inside = file.relative_to(standard).parts if file.is_relative_to(standard) else ("",)
    return inside[0] in ("", "site-packages", "dist-packages")
