"""The clock of an emulated device, which does not depend on what else the host is doing.

Dozens of ranks share a few cores, and their delays would add up. So each rank keeps the time of its
device, which moves by

- the profiled seconds of compute,
- the wait for a message until it arrives by the model of the links,
- the work of the runtime in between, as CPU time of this rank's thread, which leaves out the time
  in which other ranks had the core,

and waits until the wall clock has come as far. A time scale above 1 slows everything down alike::

    wall = origin + scale * device time        (+ late, if the host cannot keep up)
"""

from __future__ import annotations

import time


class DeviceClock:
    """The time of one emulated device.

    Attributes:
        now: seconds since the step began, in the device's time.
        late_s: most seconds by which the wall clock was late, in the device's time.
        charged_s: CPU time of the runtime that is part of ``now``.
        origin: begin of the step by ``time.perf_counter``, which processes share.
        scale: wall seconds per device second.
    """

    def __init__(self) -> None:
        self.now = self.late_s = self.charged_s = self.origin = self._cpu = 0.0
        self.scale = 1.0

    def start(self, origin: float, scale: float) -> None:
        """Wait for the beginning of a step, which may be in the future."""
        self.origin, self.scale = origin, scale
        self.now = self.late_s = self.charged_s = 0.0
        self.pace()
        self.late_s = 0.0
        self.resume()

    def charge(self) -> None:
        """Count the CPU time since ``resume`` as the device's."""
        cpu = time.thread_time()
        self.now += cpu - self._cpu
        self.charged_s += cpu - self._cpu
        self._cpu = cpu

    def resume(self) -> None:
        """Go on with work that counts; CPU time of the thread since ``charge`` does not count."""
        self._cpu = time.thread_time()

    def pass_by(self, seconds: float) -> None:
        self.now += seconds
        self.pace()

    def meet(self, at: float) -> None:
        """Wait until the device's time is at least this."""
        self.now = max(self.now, at)
        self.pace()

    def catch_up(self) -> None:
        """Set the device's time to the wall's, if that is later."""
        self.now = max(self.now, self.wall)

    @property
    def wall(self) -> float:
        """Seconds since the step began by the wall clock, in the device's time."""
        return (time.perf_counter() - self.origin) / self.scale

    def pace(self) -> None:
        """Wait until the wall clock shows the device's time."""
        left = self.origin + self.scale * self.now - time.perf_counter()
        if left > 0:
            time.sleep(left)
        else:
            self.late_s = max(self.late_s, -left / self.scale)
