"""A checkpoint that is written while training goes on: on each rank a copy, then a thread.

::

    training   step 8 | copy | step 9 | totals of 8 are good: confirm | step 10 ...
    threads                   write the copy ........................
    rank 0                    ....... wait for all parts, and for the confirmation: finish

No rank waits for another one to begin a checkpoint: they meet in the folder. A step may be known as
good only after the next one (``Pipeline.steps``), so the folder gets its name no sooner.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

from anabranch.checkpoint.series import keep_newest
from anabranch.checkpoint.writing import RankPart, Target, abandon, begin, finish, write_part
from anabranch.errors import TrainingError

_POLL_S = 0.01
"""Seconds between two looks into the folder: short beside the writing of a file."""


class Saving:
    """One rank's share of a checkpoint that is being written.

    Args:
        part: part of this rank; its tensors belong to the thread from now on.
        keep: most checkpoints in the parent folder afterwards; by default all.
        timeout: seconds without anything new in the folder until another rank counts as lost.
        ready: called in the thread; waits until a device has copied the part's tensors.

    Raises:
        TrainingError: if the folder exists, or cannot be made.
    """

    def __init__(
        self,
        target: Target,
        rank: int,
        part: RankPart,
        *,
        keep: int | None,
        timeout: float,
        ready: Callable[[], None] = lambda: None,
    ) -> None:
        self._target, self._rank, self._keep, self._timeout = target, rank, keep, timeout
        self._ready = ready
        self._good, self._given_up = threading.Event(), threading.Event()
        self._is_written, self._is_complete = threading.Event(), threading.Event()
        self._error: Exception | None = None
        self._lock = begin(target) if rank == 0 else None
        name = f"anabranch save {target.folder}"
        self._thread = threading.Thread(target=self._work, args=(part,), name=name)
        self._thread.start()

    def confirm(self) -> None:
        """Confirm that the saved step was a good one on all ranks."""
        self._good.set()

    @property
    def is_open(self) -> bool:
        """True until it is known whether the step was a good one."""
        return not (self._good.is_set() or self._given_up.is_set())

    def check(self) -> None:
        """Raise the error of the thread so far, if any, a TrainingError."""
        if self._error is not None and not self._given_up.is_set():
            raise self._error

    def wait(self, waiting: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
        """Wait until the checkpoint is complete or given up; raises TrainingError where it failed.

        Args:
            waiting: context of the wait for the parts of other ranks.
        """
        self._is_written.wait()
        with waiting():
            self._is_complete.wait()
            if self._rank != 0 and self._error is None:
                with suppress(TrainingError):  # the first rank says what went wrong
                    self._wait_for(lambda: not self._target.partial.exists())
        self._thread.join()
        self.check()

    def give_up(self) -> None:
        """Give the checkpoint up after a bad step or a failure: it never gets its name."""
        self._given_up.set()

    def _work(self, part: RankPart) -> None:
        try:
            self._ready()
            if self._rank != 0:
                self._wait_for(self._target.partial.is_dir)
            write_part(self._target, self._rank, part)
            self._is_written.set()
            if self._lock is not None:
                self._wait_for(self._all_parts)
                self._wait_for(self._good.is_set, limited=False)
                self._is_complete.set()
                finish(self._target, self._lock)
                self._lock = None
                if self._keep is not None:
                    keep_newest(self._target.folder.parent, self._keep)
        except Exception as error:
            self._error = error
            if self._lock is not None:
                abandon(self._target, self._lock)
            elif self._rank != 0:
                mark = self._target.description(self._rank).with_suffix(".failing")
                with suppress(OSError):  # so that the first rank does not wait in vain
                    try:
                        mark.write_text(str(error), "utf-8", "replace")
                    finally:  # empty on a full disk
                        mark.rename(mark.with_suffix(".failed"))
        finally:
            self._is_written.set()
            self._is_complete.set()

    def _all_parts(self) -> bool:
        target = self._target
        if failed := sorted(target.partial.glob("*.failed")):
            why = failed[0].read_text("utf-8")
            full = f"{failed[0].stem} failed, without room to say why; make room on that disk"
            raise TrainingError(why or f"{target.folder} cannot be written: {full}")
        return all(target.description(rank).exists() for rank in range(target.num_ranks))

    def _wait_for(self, condition: Any, *, limited: bool = True) -> None:
        """Wait for a condition; TrainingError if given up, or if no rank writes for too long."""
        seen, since = -1, time.monotonic()
        while not condition():
            if self._given_up.wait(_POLL_S) or not threading.main_thread().is_alive():
                raise TrainingError(f"{self._target.folder} was given up")
            if (size := self._written()) != seen:
                seen, since = size, time.monotonic()
            elif limited and time.monotonic() - since > self._timeout:
                raise TrainingError(
                    f"{self._target.folder} cannot be written: for {self._timeout:g} s no rank has "
                    "written anything; several machines need a file system that all of them see"
                )

    def _written(self) -> int:
        try:
            return sum(path.stat().st_size for path in self._target.partial.iterdir())
        except OSError:
            return 0
