"""The machine at hand, and whether a calibration is one of it."""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from anabranch.cluster import Machine


def this_machine() -> Machine:
    """The machine at hand; torch is not imported for it."""
    return Machine(_processor(), os.cpu_count() or 1, _torch())


def difference(measured: Machine, here: Machine) -> str:
    """What differs between the machine of a calibration and this one, as text; empty if nothing."""
    found = []
    if measured.processor != here.processor:
        found.append(f"its processor is {measured.processor}, the one here {here.processor}")
    if measured.cores != here.cores:
        found.append(f"it has {measured.cores} cores, this one {here.cores}")
    if measured.torch != here.torch:
        found.append(f"it ran torch {measured.torch}, here is {here.torch}")
    return "; ".join(found)


def _processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def _torch() -> str:
    try:
        return version("torch")
    except PackageNotFoundError:
        return "none"
