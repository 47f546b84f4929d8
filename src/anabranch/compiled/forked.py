"""A loop over a few items, in as many processes as there are cores for them.

The processes are forked, so the function finds all that it needs in memory. Their changes there do
not reach this process; only results are sent back.
"""

from __future__ import annotations

import gc
import os
import pickle
import signal
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import BinaryIO, Generic, TypeVar
from warnings import catch_warnings, simplefilter

Item = TypeVar("Item")
Result = TypeVar("Result")


def run_each(function: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """Return the results of a slow function, in the order of the items.

    This process does its own share, and the share of any that failed. An error in this process, or
    an interrupt (Ctrl-C), ends the others and reaches the caller.
    """
    count = min(len(items), cores())
    if count < 2:
        return [function(item) for item in items]
    shares = [items[first::count] for first in range(count)]
    others: list[ForkedWorker[Result] | None] = []
    try:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:  # the others ignore an interrupt; this process ends them
            others += [start(function, share) for share in shares[1:]]
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        results = [[function(item) for item in shares[0]]]
        for share, worker in zip(shares[1:], others, strict=True):
            sent = worker.results() if worker else None
            results.append([function(item) for item in share] if sent is None else sent)
    finally:
        for worker in others:
            if worker:
                worker.end()
    return [results[i % count][i // count] for i in range(len(items))]


def cores() -> int:
    """Return the cores that this process may use; 1 if it cannot be forked, or has threads, which
    may hold a lock during the fork.
    """
    if threading.active_count() > 1 or not hasattr(os, "sched_getaffinity"):
        return 1
    return len(os.sched_getaffinity(0))


class ForkedWorker(Generic[Result]):
    """A forked process, and the pipe for its results."""

    def __init__(self, process: int, pipe: BinaryIO) -> None:
        self._process, self._pipe = process, pipe

    def results(self) -> list[Result] | None:
        """Return the results of the process; None if it failed."""
        with suppress(Exception):  # after any error the caller computes the results itself
            results: list[Result] = pickle.load(self._pipe)
            return results
        return None

    def end(self) -> None:
        """Kill the process."""
        self._pipe.close()
        with suppress(ProcessLookupError, ChildProcessError):  # it may be gone
            os.kill(self._process, signal.SIGKILL)
            os.waitpid(self._process, 0)


def start(function: Callable[[Item], Result], items: Sequence[Item]) -> ForkedWorker[Result] | None:
    """Fork a process that works on some items; None if the system allows no more."""
    try:
        reading, writing = os.pipe()
    except OSError:
        return None
    try:
        with catch_warnings():  # about threads of libraries, which the process does not use
            simplefilter("ignore", DeprecationWarning)
            process = os.fork()
    except OSError:
        os.close(reading)
        os.close(writing)
        return None
    if process:
        os.close(writing)
        return ForkedWorker(process, os.fdopen(reading, "rb"))
    gc.freeze()  # a collection would copy all inherited memory
    try:
        sent = pickle.dumps([function(item) for item in items])
        with os.fdopen(writing, "wb") as pipe:
            pipe.write(sent)
    finally:
        os._exit(0)  # without the parent's exit handlers
