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
from typing import Any

from torch._C._distributed_c10d import Store

from anabranch.errors import AnabranchError, StageFailedError
from anabranch.runtime.guards.heartbeat import Watch
from anabranch.runtime.guards.position import POSITION
from anabranch.runtime.guards.same_batch import RECENT_BATCHES
from anabranch.runtime.guards.shared_failure import FAILURE_KEY, failure_in, stops_because_of
from anabranch.runtime.guards.timeouts import TIMEOUTS
from anabranch.runtime.process_groups import run_store

_READERS = 2
"""Ranks that read the heartbeats of all, from rank 0 on."""


def watch_ranks(
    rank: int, size: int, timeout_s: float, patience_s: float | None = None
) -> StoreWatch | None:
    """Watch under torchrun that the ranks go on; the parent of local ranks watches them itself."""
    if size == 1 or "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    store: Any = run_store()
    # Every store of torch has it; its stubs do not.
    return StoreWatch(store.clone(), rank, size, timeout_s, patience_s=patience_s)


class StoreWatch:
    """One rank's threads: one tells its heartbeat and reads others, one misses the store.

    Args:
        store: a connection of its own.
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
                failure = failure_in(self._store)
                problem = None if failure else self._look()
                self._reached = time.monotonic()
            except (RuntimeError, ValueError):
                continue
            if failure:
                # The rank itself knows better; it may be unable to.
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
