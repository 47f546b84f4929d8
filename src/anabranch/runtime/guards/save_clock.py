"""Checkpoints every so many seconds, after the same step on all ranks.

Clocks differ, and ranks are at different steps, so one clock decides, that of the first rank. As
with ``interrupt``, its wish travels with the totals of every step, which all ranks read between the
same steps.
"""

from __future__ import annotations

import time


class SaveClock:
    """Checkpoints that the first rank wants, and all ranks know of, by number from 1."""

    def __init__(self) -> None:
        self.start(None, rank=0)

    def start(self, interval_s: float | None, *, rank: int) -> None:
        """Count the seconds from now on; None for no such checkpoints."""
        self.wanted = self._agreed = self._begun = 0
        decides = rank == 0 and interval_s is not None
        self._interval_s = interval_s if decides and interval_s is not None else float("inf")
        self._since = time.monotonic()

    def look(self) -> None:
        """Want another checkpoint, on the first rank, if it is time."""
        if self.wanted == self._begun and time.monotonic() - self._since >= self._interval_s:
            self.wanted += 1

    def agree(self, wanted: int) -> None:
        """Note what the first rank wants, once all ranks know it."""
        self._agreed = max(self._agreed, wanted)

    @property
    def is_due(self) -> bool:
        """True if a checkpoint is due now, the same on every rank."""
        return self._agreed > self._begun

    def begin(self) -> None:
        """Note that a checkpoint is being written, for whatever reason."""
        self._begun, self._since = self._agreed, time.monotonic()


SAVE_CLOCK = SaveClock()
"""Of this process. A rank is a process, so there is one."""
