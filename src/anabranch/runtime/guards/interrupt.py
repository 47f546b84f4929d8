"""An early end of training, and checkpoints by the clock, at one step on all ranks.

Ctrl-C comes to one process or to several, while ranks are at different steps. A rank that hears it
only notes it; the note goes with the totals of every step (``step_totals``), which all ranks read
between the same steps. So does the wish of the first rank for a checkpoint::

    rank 0    step 7    step 8    step 9 | read totals of 8: someone has heard, stop
    rank 1    step 7    step 8    step 9 | read totals of 8: someone has heard, stop
                        ^ rank 0 hears of Ctrl-C
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from anabranch.runtime.guards.timeouts import TIMEOUTS


class Interrupt:
    """Request to end training early; ``agreed`` once all ranks know that all ranks know of it."""

    def __init__(self) -> None:
        self._flag = memoryview(bytearray(8)).cast("q")
        self.agreed = False

    def share(self, flag: memoryview) -> None:
        """Read the request from an integer in memory that another process writes."""
        self._flag, self.agreed = flag, False

    @property
    def heard(self) -> bool:
        return self._flag[0] != 0

    def hear(self) -> None:
        """Note the request, for this process and others that share its flag."""
        self._flag[0] = 1


INTERRUPT = Interrupt()
"""The request to this process, which is one rank."""


@contextmanager
def handling(hear: Callable[[int], None]) -> Iterator[dict[int, Any]]:
    """Context manager that handles SIGINT and SIGTERM by a function, in the main thread of a
    process; yields the previous handlers. Ignored signals stay ignored, as in a background job.
    """
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    is_main = threading.current_thread() is threading.main_thread()
    # None stands for a handler that is not Python's.
    heard = [n for n, was in before.items() if is_main and was not in (None, signal.SIG_IGN)]
    for number in heard:
        signal.signal(number, lambda number, _: hear(number))
    try:
        yield {int(number): was for number, was in before.items()}
    finally:
        for number in heard:
            signal.signal(number, before[number])


@contextmanager
def listening() -> Iterator[None]:
    """Context manager under which SIGINT or SIGTERM first asks training to end, then ends it."""
    INTERRUPT.share(memoryview(bytearray(8)).cast("q"))
    first: float | None = None
    process = os.getpid()

    def hear(number: int) -> None:
        nonlocal first
        if os.getpid() != process:
            # The user's data may fork processes, and ends them with a signal.
            signal.signal(number, before[number])
            os.kill(os.getpid(), number)
        elif first is None:
            first = time.monotonic()
            INTERRUPT.hear()
        elif time.monotonic() - first > TIMEOUTS.echo_s:
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)

    with handling(hear) as before:
        yield


class SaveClock:
    """Checkpoints at intervals of seconds, by the first rank's clock and agreed on by all ranks;
    they are numbered from 1.
    """

    def __init__(self) -> None:
        self.start(None, rank=0)

    def start(self, interval_s: float | None, *, rank: int) -> None:
        """Begin the first interval now; None for no such checkpoints."""
        self.wanted = self._agreed = self._begun = 0
        decides = rank == 0 and interval_s is not None
        self._interval_s = interval_s if decides and interval_s is not None else float("inf")
        self._since = time.monotonic()

    def look(self) -> None:
        """Ask for another checkpoint, on the first rank, if it is time."""
        if self.wanted == self._begun and time.monotonic() - self._since >= self._interval_s:
            self.wanted += 1

    def agree(self, wanted: int) -> None:
        """Note the number that the first rank wants, once all ranks know it."""
        self._agreed = max(self._agreed, wanted)

    @property
    def is_due(self) -> bool:
        """True if a checkpoint is due now, the same on every rank."""
        return self._agreed > self._begun

    def begin(self) -> None:
        """Note that a checkpoint is being written, for this or any other reason."""
        self._begun, self._since = self._agreed, time.monotonic()


SAVE_CLOCK = SaveClock()
"""The clock of this process, which is one rank."""
