"""The cache folder, in which commands keep files for later commands."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from anabranch.errors import warn


def cache_folder() -> Path:
    """Return ``$ANABRANCH_CACHE``, or ``anabranch`` in ``$XDG_CACHE_HOME`` or ``~/.cache``."""
    own = os.environ.get("ANABRANCH_CACHE")
    if own:
        return Path(own).absolute()
    shared = Path(os.environ.get("XDG_CACHE_HOME") or "")
    # By the specification of XDG relative paths are ignored.
    return (shared if shared.is_absolute() else Path.home() / ".cache") / "anabranch"


def private_folder(name: str) -> Path | None:
    """Return a subfolder of the cache to which other users cannot write; None, with a warning, if
    they can, and None if it cannot be made.
    """
    folder = cache_folder() / name
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError:
        return None
    is_own = not hasattr(os, "geteuid") or status.st_uid == os.geteuid()
    if is_own and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return folder
    warn(
        f"{folder} is not used: others can write to it, or it belongs to another user; give it to "
        f"yourself alone (chmod 700), or name another folder in ANABRANCH_CACHE"
    )
    return None
