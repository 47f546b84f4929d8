"""The host of this process."""

from __future__ import annotations

import socket
from functools import cache
from pathlib import Path


@cache
def host() -> str:
    """Return the name of this host and, as several may have one name, the number of its boot."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()} {boot.read_text().strip() if boot.exists() else ''}"
