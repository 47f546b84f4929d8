"""A watch for files that are read while a user's model is captured, other than code.

What a forward reads from a file is in no key, so such a capture is not kept.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from anabranch.capture_cache.key import is_installed

_watching: list[set[str]] = []


@contextmanager
def files_read() -> Iterator[set[str]]:
    """Inside, the paths of files that are opened, but for code and what is installed."""
    _listen()
    found: set[str] = set()
    _watching.append(found)
    try:
        yield found
    finally:
        _watching.remove(found)


@cache
def _listen() -> None:
    sys.addaudithook(_heard)  # once: a hook cannot be taken away


def _heard(event: str, arguments: tuple[Any, ...]) -> None:
    if not _watching or event != "open":
        return
    named, _, flags = arguments
    if not isinstance(named, str | bytes) or flags & (os.O_CREAT | os.O_TRUNC):
        return
    path = os.path.abspath(os.fsdecode(named))
    is_code = path.endswith((".py", ".pyc")) or is_installed(Path(path))
    if not is_code and os.path.exists(path):
        for found in _watching:
            found.add(path)
