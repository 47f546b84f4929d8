"""Operations on meta tensors without the import of ``torch._dynamo``, which takes a second.

PyTorch computes what many operations return on the meta device in Python, in functions that the
compiler is not to look into. At its first call each such function asks ``torch._dynamo`` to be
excluded (``torch._compile``), and so imports all of a compiler that nothing here uses.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

_NAME = "torch._dynamo"
_KEPT = "__dynamo_disable"
"""Where such a function keeps what ``torch._dynamo.disable`` made of it."""


@contextmanager
def without_dynamo() -> Iterator[None]:
    """Inside, functions that ask to be excluded from compilation stay as they are, for then, unless
    ``torch._dynamo`` is there already. Nothing inside may compile: it would find no compiler.
    """
    if _NAME in sys.modules:
        yield
        return
    asked: list[Callable[..., Any]] = []

    def disable(function: Callable[..., Any], *_: object, **__: object) -> Callable[..., Any]:
        asked.append(function)
        return function

    stand_in = ModuleType(_NAME)
    vars(stand_in)["disable"] = disable
    sys.modules[_NAME] = stand_in
    try:
        yield
    finally:
        if sys.modules.get(_NAME) is stand_in:
            del sys.modules[_NAME]
        for function in asked:
            vars(function).pop(_KEPT, None)  # so that a later call asks the compiler itself
