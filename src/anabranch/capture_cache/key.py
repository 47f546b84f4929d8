"""Keys of kept captures: equal keys mean equal captures.

A key is a hash over Python's version, torch's, the sources of this package that take part in a
capture, the granularity, and the model:

- a built-in one by its name, preset and options, as nothing else enters it;
- one of the user's own by the module that was built and the example, down to every attribute
  (``described``), and by the code: the contents of every loaded file of the user's, the values in
  those modules, and which other packages are installed.

Where something of a user's model cannot be told for certain, there is no key.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

_PROGRAM = ("__main__", "__mp_main__")
"""Modules that are the command itself, which is no part of any model."""
_PACKAGE = Path(__file__).parents[1]

CAPTURING = (
    *("errors.py", "remembered.py", "workload.py", "cluster.py"),
    *("graph", "data", "profile", "models"),
)
"""The files and folders of this package that take part in building, capturing and tracing."""


def builtin_key(model: str, preset: str, options: Mapping[str, str], granularity: str) -> str:
    """The key of a built-in model; takes some milliseconds and does not import torch."""
    return _digest([_versions(), granularity, model, preset, sorted(options.items())])


def workload_key(model: str, described: Any, sources: Any, granularity: str) -> str:
    """The key of a user's model, by ``describe`` and ``own_sources``."""
    return _digest([_versions(), granularity, model, described, sources])


def own_modules(loaded: Mapping[str, ModuleType]) -> dict[str, Path]:
    """The loaded modules that are neither Python's, nor torch, nor installed, with their files."""
    found = {}
    for name, module in sorted(loaded.items()):
        file = getattr(module, "__file__", None) or ""
        # torch.ops and the like name a file without a folder, and are not loaded from it.
        if os.path.isabs(file) and name not in _PROGRAM and not is_installed(Path(file)):
            found[name] = Path(file)
    return found


def own_sources(files: Mapping[str, Path]) -> Any:
    """What the code of a user's model is: hashes of its files, and what is installed.

    Raises:
        OSError: if a file is gone.
    """
    contents = [[name, str(path), _hash(path.read_bytes())] for name, path in files.items()]
    return [contents, list(_installed_packages())]


def is_installed(file: Path) -> bool:
    """Whether a file is of Python, or of a package that is installed, this one included."""
    return str(file).startswith(_installed_places())


@cache
def _installed_places() -> tuple[str, ...]:
    places = {*sysconfig.get_paths().values(), str(_PACKAGE)}
    places |= {entry for entry in sys.path if entry.endswith(("site-packages", "dist-packages"))}
    torch = importlib.util.find_spec("torch")
    if torch is not None and torch.origin is not None:
        places.add(str(Path(torch.origin).parent))
    wanted = [Path(place) for place in places if place]
    # The folder of scripts and the prefix itself may hold a user's files.
    others = (p for p in wanted if p.name not in ("bin", "Scripts") and p != Path(sys.prefix))
    return tuple(f"{place}{os.sep}" for place in others)


def _installed_packages() -> Iterator[list[Any]]:
    """Name, version and time of installation of every package."""
    for place in sorted({entry for entry in sys.path if entry.endswith("-packages")}):
        for path in sorted(Path(place).glob("*.dist-info")):
            yield [str(path), path.stat().st_mtime_ns]


def _versions() -> list[Any]:
    torch = importlib.util.find_spec("torch")
    assert torch is not None
    assert torch.origin is not None
    # Has the version, the commit and what it was built for, and importing torch takes seconds.
    version = Path(torch.origin).with_name("version.py").read_bytes()
    return [sys.version, _hash(version), _own_code()]


def _own_code() -> str:
    digest = hashlib.sha256()
    for name in CAPTURING:
        place = _PACKAGE / name
        for path in [place] if place.is_file() else sorted(place.rglob("*.py")):
            digest.update(f"{path.relative_to(_PACKAGE)}\0".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _digest(parts: Any) -> str:
    return _hash(json.dumps(parts, sort_keys=True).encode())
