"""Train any PyTorch model as a pipeline whose stages form a graph.

The public names, those of ``__init__.pyi``, load on first use, so that ``import anabranch`` and
planning on a saved profile never import torch.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from typing import Any

_STUB = (pkgutil.get_data(__name__, "__init__.pyi") or b"").decode()  # also from a zip file
_HOME = {name: module for module, name in re.findall(r"from (\S+) import .+ as (\w+)", _STUB)}
"""Public name -> the module that defines it."""

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'anabranch' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
