"""The folder of what commands keep for later ones."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """``$ANABRANCH_CACHE``, or ``anabranch`` in ``$XDG_CACHE_HOME`` or ``~/.cache``."""
    own = os.environ.get("ANABRANCH_CACHE")
    if own:
        return Path(own).absolute()
    shared = Path(os.environ.get("XDG_CACHE_HOME") or "")
    # The specification of XDG has relative paths ignored.
    return (shared if shared.is_absolute() else Path.home() / ".cache") / "anabranch"
