"""This machine: whether a calibration is of it, and the load by other processes."""

from __future__ import annotations

import os
import platform
import time
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

from anabranch.cluster import BUSY, Machine


def this_machine() -> Machine:
    """Return this machine, without importing torch."""
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
    """Load by processes other than this one and its ended children, since the object was made; 0 if
    the kernel does not tell (Linux does).
    """

    def __init__(self) -> None:
        self._began, self._before = time.perf_counter(), _others_s()

    def cores(self) -> float:
        """Return the mean number of processor cores that they have kept busy."""
        seconds = time.perf_counter() - self._began
        return max(0.0, _others_s() - self._before) / max(seconds, 1e-9)

    def share(self) -> float:
        """Return the share of the time of all cores that they have taken."""
        return min(1.0, self.cores() / (os.cpu_count() or 1))

    def remark(self, what: str) -> str:
        """Return a sentence on their load while ``what`` was measured; empty for a small one."""
        if self.share() <= BUSY:
            return ""
        return (
            f"others kept {self.cores():.1f} of the {os.cpu_count() or 1} cores busy while {what} "
            "was measured: by seconds of a quiet machine the plan may be another one"
        )


def _others_s() -> float:
    """Return the processor seconds of other processes since the machine was started."""
    try:
        line = Path("/proc/stat").read_text(encoding="ascii").partition("\n")[0]
    except OSError:
        return 0.0
    return computed_s(line, os.sysconf("SC_CLK_TCK")) - sum(os.times()[:4])


def computed_s(line: str, ticks: int) -> float:
    """Return the busy seconds of all cores by the first line of /proc/stat. Time that a hypervisor
    gave to other machines counts; idling and waiting for a disk do not.
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
