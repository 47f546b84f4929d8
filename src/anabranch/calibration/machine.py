"""The machine at hand: whether a calibration is one of it, and who else computes on it."""

from __future__ import annotations

import os
import platform
import time
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

from anabranch.cluster import Machine


def this_machine() -> Machine:
    """The machine at hand; torch is not imported for it."""
    return Machine(_processor(), os.cpu_count() or 1, version("torch"))


def difference(measured: Machine, here: Machine) -> str:
    """Describe how the machine of a calibration differs from this one; empty if it does not."""
    facts = (
        (measured.processor, here.processor, "its processor is {}, the one here {}"),
        (measured.cores, here.cores, "it has {} cores, this one {}"),
        (measured.torch, here.torch, "it ran torch {}, here is {}"),
    )
    return "; ".join(text.format(then, now) for then, now, text in facts if then != now)


class OtherLoad:
    """Load by processes besides this one and its ended children since it was made; 0 where the
    kernel does not say (Linux does).
    """

    def __init__(self) -> None:
        self._began, self._before = time.perf_counter(), _others_s()

    def cores(self) -> float:
        """Mean number of processor cores that they have kept busy."""
        seconds = time.perf_counter() - self._began
        return max(0.0, _others_s() - self._before) / max(seconds, 1e-9)

    def share(self) -> float:
        """Share of the time of all cores that they have taken."""
        return min(1.0, self.cores() / (os.cpu_count() or 1))


def _others_s() -> float:
    """Processor seconds of others since the machine was started."""
    try:
        line = Path("/proc/stat").read_text(encoding="ascii").partition("\n")[0]
    except OSError:
        return 0.0
    return computed_s(line, os.sysconf("SC_CLK_TCK")) - sum(os.times()[:4])


def computed_s(line: str, ticks: int) -> float:
    """Seconds that all cores have computed by the first line of /proc/stat, with what a hypervisor
    gave to other machines; idling and waiting for a disk are no part.
    """
    user, nice, system, _, _, *interrupts_and_stolen = map(int, line.split()[1:9])
    return (user + nice + system + sum(interrupts_and_stolen)) / ticks


def _processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()
