"""The files of kept captures: one each, named by its key, written whole or not at all.

Any number of processes may read, write and clean up at once: a file is put in its place by a
rename, and one that another process has removed is captured again.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from anabranch.errors import FileFormatError
from anabranch.files.cache_folder import cache_folder
from anabranch.files.captures import load_capture, save_capture
from anabranch.profile.kernel_trace import TracedModel

MOST_BYTES = 2**27
"""What all kept captures may take on disk; the least recently used go first. The one of mmt in the
published size, 97 operators and 3,000 kernels, has 0.5 MB."""


def folder() -> Path:
    """Where captures are kept."""
    return cache_folder() / "captures"


def load(key: str) -> TracedModel | None:
    """The capture of that key, or None; raises FileFormatError if its file is damaged."""
    path = _path(key)
    if not path.exists():
        return None
    found = load_capture(path, key)
    with contextlib.suppress(OSError):
        os.utime(path)  # used, so that it is not the first to go
    return found


def save(key: str, traced: TracedModel) -> None:
    """Keep a capture, where that is possible: a folder that cannot be written is no error."""
    with contextlib.suppress(OSError, FileFormatError):
        path = _path(key)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        save_capture(traced, key, path)
        _shrink(path.parent, path)


def _path(key: str) -> Path:
    return folder() / f"{key}.json"


def _shrink(home: Path, newest: Path) -> None:
    """Remove what was used longest ago until the rest is within bounds."""
    files = []
    for path in home.iterdir():
        with contextlib.suppress(FileNotFoundError):  # another process removed it
            status = path.stat()
            files.append((status.st_mtime, status.st_size, path))
    total = sum(size for _, size, _ in files)
    for _, size, path in sorted(files):
        if total <= MOST_BYTES:
            return
        if path != newest:
            path.unlink(missing_ok=True)
            total -= size
