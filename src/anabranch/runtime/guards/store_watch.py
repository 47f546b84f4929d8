"""Ranks of torchrun watch each other through the store, as a launcher watches local ranks.

A thread of each rank tells where the rank is, and with which batches. Those of the first two read
what all tell, and end the run when it does not go on: two, because one of them may be what does
not. A rank whose store is out of reach, behind a cut link, ends itself: a second thread sees that
the first has not come back from the store, which behind a cut link answers nothing, not even an
error. The thread has a connection of its own, so it is not held up by what the rank does.
"""

from __future__ import annotations

import atexit
import math
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

from torch._C._distributed_c10d import Store

from anabranch.errors import AnabranchError, DataError, StageFailedError
from anabranch.runtime.guards.position import POSITION, POSITION_INTS
from anabranch.runtime.guards.same_batch import RECENT_BATCHES, BatchWatch
from anabranch.runtime.guards.stall import Stall

_READERS = 2
_GRACE_S = 1.0
"""Seconds that a rank has to end by itself when another one has told why the run ends."""


class StoreWatch:
    """One rank's thread.

    Args:
        store: which the thread has for itself.
        timeout_s: seconds without progress of any rank, or without the store.
        failure_key: where a failure is told.
        end: ends the process, by default at once.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        timeout_s: float,
        failure_key: str,
        end: Callable[[], None] = lambda: os._exit(1),
    ) -> None:
        self._store, self._rank, self._size, self._key = store, rank, size, failure_key
        self._timeout_s, self._end = timeout_s, end
        self._interval_s = min(0.5, timeout_s / 4)
        store.set_timeout(timedelta(seconds=max(timeout_s / 2, 0.5)))
        self._stall = Stall(timeout_s)
        self._beats: dict[int, tuple[int, float]] = {}
        self._batches = BatchWatch(size)
        self._closed = threading.Event()
        self._tell(0)  # so that nobody is unknown, however soon it is held up
        self._reached = time.monotonic()
        targets = {"anabranch watch": self._work, "anabranch store": self._watch_store}
        self._threads = [
            threading.Thread(target=target, name=name, daemon=True)
            for name, target in targets.items()
        ]
        for thread in self._threads:
            thread.start()
        atexit.register(self.close)  # a process that ends by itself holds nobody up

    def close(self) -> None:
        """The rank is done, and is not held up."""
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
                told_why = self._failure()
                found = None if told_why else self._look()
                self._reached = time.monotonic()
            except (RuntimeError, ValueError):
                continue
            if told_why:
                # The rank itself knows better; it may be unable to.
                self._reached = math.inf
                if not self._closed.wait(_GRACE_S):
                    culprit = told_why.partition(":")[0]
                    text = f"rank {self._rank} stops, because rank {culprit} failed"
                    self._leave(StageFailedError(text))
                return
            if found is not None:
                with suppress(RuntimeError, ValueError):
                    self._store.compare_set(self._key, "", f"{self._rank}: {found}")
                    time.sleep(self._interval_s)  # others read it, if this rank has the store
                self._leave(found)
                return

    def _watch_store(self) -> None:
        while not self._closed.wait(self._interval_s):
            silent_s = time.monotonic() - self._reached
            if silent_s > self._timeout_s:
                where = POSITION or "outside of the steps"
                self._leave(
                    StageFailedError(
                        f"rank {self._rank} has not reached the store of the run at "
                        f"{os.environ.get('MASTER_ADDR', 'the first host')} for {silent_s:.1f} s, "
                        f"{where}: the network to it, or the host, is gone"
                    )
                )
                return

    def _tell(self, beat: int) -> None:
        numbers = [beat, *POSITION.numbers, *RECENT_BATCHES.numbers]
        self._store.set(f"anabranch/at/{self._rank}", " ".join(map(str, numbers)))

    def _failure(self) -> str:
        return self._store.get(self._key).decode() if self._store.check([self._key]) else ""

    def _look(self) -> AnabranchError | None:
        """Why the run cannot go on, if this rank is one of those who look."""
        if self._rank >= _READERS:
            return None
        now = time.monotonic()
        for rank in range(self._size):
            key = f"anabranch/at/{rank}"
            if not self._store.check([key]):
                continue
            beat, *page = map(int, self._store.get(key).split())
            position, recent = page[:POSITION_INTS], page[POSITION_INTS:]
            if not position:  # it is done
                self._stall.forget(rank, now)
                self._beats.pop(rank, None)
                continue
            self._stall.note(rank, position, now)
            self._batches.note(rank, recent)
            if rank not in self._beats or self._beats[rank][0] != beat:
                self._beats[rank] = beat, now
        silent = {r for r, (_, since) in self._beats.items() if now - since > self._timeout_s / 2}
        if unequal := self._batches.found(now):
            return DataError(unequal)
        stalled = self._stall.found(now, silent)
        return StageFailedError(stalled) if stalled else None

    def _leave(self, why: AnabranchError) -> None:
        if self._closed.is_set():
            return
        self._closed.set()
        sys.stderr.write(f"{type(why).__name__}: {why}\n")
        sys.stderr.flush()
        self._end()
