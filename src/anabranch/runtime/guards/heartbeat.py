"""Heartbeats of ranks, and the detection of a run that cannot go on: a stall, unequal batches.

A heartbeat is a rank's position and its last batches, in integers that another process reads: the
parent of local ranks in shared memory, ranks of torchrun in the store of the run
(``StoreWatch``). Both give them to a ``Watch``, again and again. One rank that does not go on soon
holds up all others, which wait for it. If no rank goes on for long, that is a stall::

    rank 0   waiting for gradients ...         12 s     a victim
    rank 1   in the forward of stage 1 ...     13 s     named first
    rank 2   waiting for activations ...       13 s     a victim

Ranks may take long without a stall: they compile in the first step, evaluate with other code, write
large files. The limit for these is at least ``TIMEOUTS.patience_s``, unless the user says
otherwise.
"""

from __future__ import annotations

import atexit
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Store

from anabranch.errors import AnabranchError, DataError, StageFailedError
from anabranch.runtime.guards.position import (
    POSITION,
    POSITION_INTS,
    Phase,
    describe_position,
    is_settled,
    phase_of,
    waits,
)
from anabranch.runtime.guards.same_batch import DIGESTS, RECENT_BATCHES, BatchWatch
from anabranch.runtime.guards.shared_failure import FAILURE_KEY, failure_in, stops_because_of
from anabranch.runtime.guards.timeouts import TIMEOUTS
from anabranch.runtime.ranks.process_groups import run_store

HEARTBEAT_INTS = POSITION_INTS + DIGESTS.recent_ints
"""Integers of one rank's heartbeat: first its position, then its last batches."""

FLOOR_S, FACTOR = 60.0, 100.0
"""Default limit: seconds, or multiples of the predicted step if that is more. A lower limit would
find hangs sooner, but take slow data or a busy machine for one.
"""


_UNHURRIED = (Phase.START_UP, Phase.EVALUATION, Phase.HELD_OUT, Phase.SAVE, Phase.MOVE)


def default_timeout_s(step_s: float) -> float:
    """Return the seconds without progress that count as a stall, for a predicted step."""
    return max(FLOOR_S, FACTOR * step_s)


def share(ints: memoryview) -> None:
    """Keep the heartbeat of this process in memory that another process reads."""
    POSITION.share(ints[:POSITION_INTS])
    RECENT_BATCHES.share(ints[POSITION_INTS:])


class Watch:
    """The last heartbeats of all ranks, and the time at which each came to its position.

    Attributes:
        held_up_by: the rank that is named first in a stall; None if there was none.

    Args:
        stall_timeout: seconds without progress that end a run; None for no limit.
        patience: limit for work that may take long, if that is more; by default
            ``TIMEOUTS.patience_s``.
    """

    def __init__(
        self, num_ranks: int, stall_timeout: float | None, patience: float | None = None
    ) -> None:
        self.held_up_by: int | None = None
        self._timeout_s = stall_timeout or float("inf")
        self._patience_s = max(
            self._timeout_s, TIMEOUTS.patience_s if patience is None else patience
        )
        self._positions: dict[int, tuple[list[int], float]] = {}
        self._batches = BatchWatch(num_ranks)

    def note(self, rank: int, ints: Sequence[int], now: float, *, is_done: bool = False) -> None:
        """Take the heartbeat of a rank, perhaps empty if it is done, at a time of any clock."""
        if ints:
            self._batches.note(rank, ints[POSITION_INTS:])
        position, before = list(ints[:POSITION_INTS]), self._positions.get(rank)
        if not is_done:
            if before is None or before[0] != position:
                self._positions[rank] = position, now
        elif before is not None:
            # Ranks that waited for it may not have noticed yet, so their times begin anew.
            del self._positions[rank]
            self._positions = {r: (there, now) for r, (there, _) in self._positions.items()}

    def problem(
        self, now: float, silent: Collection[int] = (), *, has_failed: bool = False
    ) -> AnabranchError | None:
        """Return why the run cannot go on, if something is wrong.

        Args:
            silent: ranks whose processes are stopped, or do not answer.
            has_failed: whether a rank has failed; different batches may be the cause.
        """
        if unequal := self._batches.difference(now, is_over=has_failed):
            return DataError(unequal)
        if has_failed or not (stall := self._stall(now, silent)):
            return None
        return StageFailedError(stall)

    def _stall(self, now: float, silent: Collection[int]) -> str:
        """Describe the stall of the run; empty if there is none."""
        quiet = {rank: now - since for rank, (_, since) in self._positions.items()}
        stopped = sorted(rank for rank in silent if quiet.get(rank, 0.0) > self._timeout_s)
        if not stopped:
            if not quiet or any(q <= self._limit_s(rank) for rank, q in quiet.items()):
                return ""
            positions = [position for position, _ in self._positions.values()]
            if all(phase_of(p) is Phase.OUTSIDE and not waits(p) for p in positions):
                return ""  # the user may take any time between steps
        first = self.held_up_by = stopped[0] if stopped else min(quiet, key=self._blame)
        why = "its process is stopped or does not answer, " if first in stopped else ""
        message = (
            f"rank {first} has not gone on for {quiet[first]:.1f} s: {why}{self._where(first)}"
        )
        if others := sorted(set(quiet) - {first}):
            message += f"; {self._folded(others)}"
        message += f". A rank may be silent for {self._timeout_s:g} s (--timeout)"
        if self._patience_s > self._timeout_s:
            message += f", in start-up, evaluation and while it saves for {self._patience_s:g} s"
        return message

    def _limit_s(self, rank: int) -> float:
        position, _ = self._positions[rank]
        hurries = waits(position) or (is_settled(position) and phase_of(position) not in _UNHURRIED)
        return self._timeout_s if hurries else self._patience_s

    def _blame(self, rank: int) -> tuple[bool, float]:
        """Sort key: ranks that do not wait come first, then those that stopped first."""
        position, since = self._positions[rank]
        return waits(position), since

    def _where(self, rank: int) -> str:
        return describe_position(self._positions[rank][0])

    def _folded(self, ranks: Sequence[int]) -> str:
        """Describe ranks, those that wait by their numbers alone."""
        waiting = [rank for rank in ranks if waits(self._positions[rank][0])]
        texts = [f"rank {rank} is {self._where(rank)}" for rank in ranks if rank not in waiting]
        if waiting:
            numbers = ", ".join(map(str, waiting))
            texts.append(f"waiting: rank{'s' if len(waiting) > 1 else ''} {numbers}")
        return "; ".join(texts)


_READERS = 2
"""Number of ranks that read the heartbeats of all, from rank 0 on."""


def watch_ranks(
    rank: int, size: int, timeout_s: float, patience_s: float | None = None
) -> StoreWatch | None:
    """Watch the ranks under torchrun; local ranks are watched by their parent."""
    if size == 1 or "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    store: Any = run_store()
    # Every store of torch has it; its stubs do not.
    return StoreWatch(store.clone(), rank, size, timeout_s, patience_s=patience_s)


class StoreWatch:
    """Threads of one rank of torchrun, which watch the ranks as a launcher watches local ranks.

    The first thread writes the rank's position and batches to the store. In the first two ranks it
    also reads those of all ranks, and ends the run if it does not go on: two, because one of them
    may be the rank that hangs. A rank that cannot reach the store, behind a cut link, ends itself:
    a second thread notices that the first has not come back from the store, which then gives no
    answer, not even an error.

    Args:
        store: a connection of its own, so that the rank's other requests do not hold it up.
        timeout_s: seconds without progress of any rank, or without the store.
        end: ends the process, by default at once.
        patience_s: see ``Watch``.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        timeout_s: float,
        end: Callable[[], None] = lambda: os._exit(1),
        *,
        patience_s: float | None = None,
    ) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._timeout_s, self._end = timeout_s, end
        self._interval_s = min(0.5, timeout_s / 4)
        store.set_timeout(timedelta(seconds=max(timeout_s / 2, 0.5)))
        self._watch = Watch(size, timeout_s, patience_s)
        self._beats: dict[int, tuple[int, float]] = {}
        self._closed = threading.Event()
        self._tell(0)  # at once, so that a rank is known however soon it hangs
        self._reached = time.monotonic()
        targets = {"anabranch watch": self._work, "anabranch store": self._watch_store}
        self._threads = [
            threading.Thread(target=target, name=name, daemon=True)
            for name, target in targets.items()
        ]
        for thread in self._threads:
            thread.start()
        atexit.register(self.close)  # a process that ends by itself is done

    def close(self) -> None:
        """End the watch; the rank is done."""
        atexit.unregister(self.close)
        self._closed.set()
        for thread in self._threads:
            thread.join(1.0)
        with suppress(RuntimeError, ValueError):
            self._store.set(f"anabranch/at/{self._rank}", "0")

    def _work(self) -> None:
        beat = 0
        while not self._closed.wait(self._interval_s):
            beat += 1
            try:
                self._tell(beat)
                failure = failure_in(self._store)
                problem = None if failure else self._look()
                self._reached = time.monotonic()
            except (RuntimeError, ValueError):
                continue
            if failure:
                # The rank itself should report it; it may be unable to.
                self._reached = math.inf
                if not self._closed.wait(TIMEOUTS.grace_s):
                    self._leave(StageFailedError(stops_because_of(failure, self._rank)))
                return
            if problem is not None:
                with suppress(RuntimeError, ValueError):
                    self._store.compare_set(FAILURE_KEY, "", f"{self._rank}: {problem}")
                    time.sleep(self._interval_s)  # others read it, if this rank has the store
                self._leave(problem)
                return

    def _watch_store(self) -> None:
        while not self._closed.wait(self._interval_s):
            silent_s = time.monotonic() - self._reached
            if silent_s > self._timeout_s:
                self._leave(
                    StageFailedError(
                        f"rank {self._rank} has not reached the store of the run at "
                        f"{os.environ.get('MASTER_ADDR', 'the first host')} for {silent_s:.1f} s, "
                        f"{POSITION}: the network to it, or the host, is gone"
                    )
                )
                return

    def _tell(self, beat: int) -> None:
        numbers = beat, *POSITION.numbers, *RECENT_BATCHES.numbers
        self._store.set(f"anabranch/at/{self._rank}", " ".join(map(str, numbers)))

    def _look(self) -> AnabranchError | None:
        """Return why the run cannot go on, if this rank is one of the readers."""
        if self._rank >= _READERS:
            return None
        now = time.monotonic()
        for rank in range(self._size):
            key = f"anabranch/at/{rank}"
            if not self._store.check([key]):
                continue
            beat, *ints = map(int, self._store.get(key).split())
            if not ints:
                self._beats.pop(rank, None)
            elif rank not in self._beats or self._beats[rank][0] != beat:
                self._beats[rank] = beat, now
            self._watch.note(rank, ints, now, is_done=not ints)
        silent = {r for r, (_, since) in self._beats.items() if now - since > self._timeout_s / 2}
        return self._watch.problem(now, silent)

    def _leave(self, why: AnabranchError) -> None:
        if self._closed.is_set():
            return
        self._closed.set()
        sys.stderr.write(f"{type(why).__name__}: {why}\n")
        sys.stderr.flush()
        self._end()
