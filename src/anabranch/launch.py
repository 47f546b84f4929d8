"""Local ranks: one process per device of a plan, forked with torch and the model already in memory.

Starting an interpreter and importing torch takes seconds, a fork milliseconds, and memory that no
rank writes is shared by all of them::

    parent ----fork----> rank 0 --+
       |  ---fork----> rank 1     |  shared memory and Gloo; they meet through a file
       |  ---fork----> rank 2   --+
       +<---- a pipe each: result or failure; a few shared integers each: where the rank is,
                        and with which batches

The parent takes the first failure that is a cause, stops the other ranks, and raises it. Ranks
never outlive the parent: the kernel kills them when it dies (Linux). With ``Survival`` a rank that
dies is replaced, and the others leave the step under way, connect anew and go on from copies.

A fork copies only the calling thread; a lock that another thread holds stays held in the ranks.
torch's CPU threads are safe: a rank computes on one thread, so it never asks for them.
"""

from __future__ import annotations

import mmap
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from anabranch.errors import AnabranchError, StageFailedError
from anabranch.runtime.guards.agreement import version
from anabranch.runtime.guards.failure import Failure
from anabranch.runtime.guards.heartbeat import HEARTBEAT_INTS, Watch
from anabranch.runtime.guards.interrupt import handling
from anabranch.runtime.guards.position import describe_position, waits
from anabranch.runtime.guards.timeouts import TIMEOUTS
from anabranch.runtime.ranks.local_rank import RankTask, run_rank
from anabranch.runtime.state.spare_copies import Recoveries, Survival

if TYPE_CHECKING:
    from multiprocessing.context import ForkProcess

Result = TypeVar("Result")

_OUT_OF_MEMORY = {-signal.SIGKILL, -signal.SIGBUS, -signal.SIGABRT}
"""Exit codes of processes for which there may have been no memory."""


def run(
    function: Callable[..., Result],
    num_ranks: int,
    *args: Any,
    timeout: float | None = None,
    stall_timeout: float | None = None,
    patience: float | None = None,
    on_interrupt: Callable[[], None] | None = None,
    survival: Survival | None = None,
) -> list[Result]:
    """Call a function on local ranks, each a process with one thread for computing.

    In each rank ``torch.distributed`` is initialised (Gloo), so ``Pipeline`` works in it, and
    ``LOCAL_RANK`` says which GPU is its own.

    Args:
        function: called as ``function(*args)`` in every rank; it may be a closure, because nothing
            is pickled on the way there.
        args: for the function; inherited, not copied.
        timeout: seconds for the whole call; by default there is no limit.
        stall_timeout: seconds after which a run in which no rank goes on is ended, with the rank
            that holds it up; see ``runtime.guards.heartbeat``. By default nobody watches.
        patience: likewise, seconds that start-up, the first step, an evaluation or a save may take;
            by default 600, or ``stall_timeout`` if that is more.
        on_interrupt: for functions that end early when ``runtime.guards.interrupt`` says so, such
            as ``train.train``: the first Ctrl-C, or SIGTERM, only tells the ranks, and calls this;
            the second ends them. By default the first does, Ctrl-C with a KeyboardInterrupt.
        survival: how the run outlives ranks that die, for functions that go on from copies of the
            state, as ``train.train`` does. By default the first failure ends the run.

    Returns:
        What the ranks returned, by rank. Results are pickled on their way back.

    Raises:
        AnabranchError: the first failure, with the rank's traceback as a note. Errors of this
            package keep their class, others become StageFailedError.
        ValueError: if ``num_ranks`` is less than 1.
    """
    if num_ranks < 1:
        raise ValueError(f"{num_ranks} ranks; at least 1 is needed")
    version()  # which reads all of our source: once here, for all ranks
    shared = memoryview(mmap.mmap(-1, 8 * (HEARTBEAT_INTS * num_ranks + 1))).cast("q")
    pages, flag = shared[:-1], shared[-1:]
    with _meeting_place() as store, _catching_interrupts(flag, on_interrupt):
        ranks = _RankProcesses(function, num_ranks, pages, flag, store, survival)
        try:
            ranks.start(range(num_ranks), args)
            return ranks.collect(timeout, stall_timeout, patience)
        finally:
            ranks.stop()


@contextmanager
def _meeting_place() -> Iterator[Path]:
    """Yield a file through which the ranks meet: in memory, so that nothing is left of it however
    this process ends, or where there are no such files in a folder of its own.
    """
    if sys.platform == "linux":
        descriptor = os.memfd_create("anabranch-store")  # which ranks inherit
        try:
            yield Path(f"/proc/self/fd/{descriptor}")
        finally:
            os.close(descriptor)
        return
    with tempfile.TemporaryDirectory(prefix="anabranch-") as folder:
        yield Path(folder) / "store"


@contextmanager
def _catching_interrupts(
    flag: memoryview, on_interrupt: Callable[[], None] | None
) -> Iterator[None]:
    """Context manager under which the first Ctrl-C or SIGTERM sets a flag, and the second one
    raises KeyboardInterrupt.
    """
    if on_interrupt is None:
        yield
        return
    parent = os.getpid()

    def hear(_: int) -> None:
        if os.getpid() != parent:
            return  # a rank in its first instructions
        if flag[0]:
            raise KeyboardInterrupt
        flag[0] = 1
        on_interrupt()

    with handling(hear):
        yield


class _RankProcesses:
    """Processes of all ranks, with their results and failures, in the parent."""

    def __init__(
        self,
        function: Callable[..., Any],
        num_ranks: int,
        pages: memoryview,
        flag: memoryview,
        store: Path,
        survival: Survival | None,
    ) -> None:
        self._function, self._store, self._survival = function, store, survival
        self._pages, self._flag = pages, flag
        self._members = [_RankProcess(number) for number in range(num_ranks)]
        self._results: dict[int, Any] = {}
        self._failures: dict[int, Failure] = {}
        self._dead: dict[int, Failure] = {}  # of ranks that are to be replaced
        self._lost: dict[int, Failure] = {}  # of ranks that have lost another one, and wait
        self._recovery = Recoveries()

    def start(self, ranks: Iterable[int], args: tuple[Any, ...]) -> None:
        context, parent, attempt = multiprocessing.get_context("fork"), os.getpid(), self._attempt
        for rank in ranks:
            member = self._members[rank]
            order = RankTask(rank, len(self._members), attempt, args)
            member.pipe, theirs = context.Pipe()
            process = context.Process(
                target=run_rank,
                args=(order, member.number, self._store, theirs, self._pages, self._flag, parent),
                kwargs={"function": self._function, "survives": self._survival is not None},
                name=f"anabranch rank {rank}",
            )
            with warnings.catch_warnings():
                # Python 3.12 warns of any fork with threads; the module docstring says why this one
                # is safe.
                warnings.simplefilter("ignore", DeprecationWarning)
                with theirs:
                    process.start()
            member.process = process

    @property
    def _attempt(self) -> int:
        return 0 if self._survival is None else self._survival.copies.attempt.value

    def collect(
        self, timeout: float | None, stall_timeout: float | None, patience: float | None
    ) -> list[Any]:
        deadline = None if timeout is None else time.monotonic() + timeout
        pending = set(range(len(self._members)))
        watch = Watch(len(pending), stall_timeout, patience)
        while pending:
            limit = min(TIMEOUTS.look_s, stall_timeout / 4) if stall_timeout else TIMEOUTS.look_s
            if deadline is not None:
                limit = min(limit, max(deadline - time.monotonic(), 0.0))
            pending -= self._poll(pending, limit)
            if problem := self._problem(watch, pending):
                stalled = watch.held_up_by
                if self._survival is None or stalled is None:
                    raise problem
                text = str(problem)
                self._dead[stalled] = Failure(stalled, "StageFailedError", text, "", False)
            if self._failures:
                raise self._cause(pending)
            if self._dead or self._lost:
                self._recover()
                pending = set(range(len(self._members)))
                watch = Watch(len(pending), stall_timeout, patience)
            if pending and deadline is not None and time.monotonic() >= deadline:
                raise StageFailedError(
                    f"the ranks did not finish within {timeout:g} s; {self._places(pending)}"
                )
        return [self._results[rank] for rank in range(len(self._members))]

    def _problem(self, watch: Watch, pending: set[int]) -> AnabranchError | None:
        """Return why the ranks cannot go on, if their heartbeats show it."""
        now = time.monotonic()
        for rank in range(len(self._members)):
            watch.note(rank, self._page(rank).tolist(), now, is_done=rank not in pending)
        stopped = {rank for rank in pending if self._is_stopped(rank)}
        return watch.problem(now, stopped, has_failed=bool(self._failures))

    def _is_stopped(self, rank: int) -> bool:
        """Return True if SIGSTOP or a debugger has stopped a process (Linux)."""
        try:
            process = self._members[rank].process
            state = Path(f"/proc/{process and process.pid}/stat").read_text()
        except OSError:
            return False
        return state.rpartition(")")[2].split()[0] in "Tt"

    def _poll(self, pending: set[int], limit: float | None) -> set[int]:
        """Wait for messages or ends of ranks, note them, and return these ranks."""
        # A pipe becomes readable when its rank speaks, and also when it dies without a word.
        ready = wait([self._members[rank].pipe for rank in pending], limit)
        heard = {rank for rank in pending if self._members[rank].pipe in ready}
        for rank in heard:
            try:
                reply = pickle.loads(self._members[rank].pipe.recv_bytes())
            except (EOFError, ConnectionResetError):
                reply = self._death(rank)
                if self._survival is not None:
                    self._dead[rank] = reply
                    continue
            if not isinstance(reply, Failure):
                (self._results[rank],) = reply
            elif reply.is_consequence and self._survival is not None:
                self._lost[rank] = reply
            else:
                self._failures[rank] = reply
        return heard

    def _recover(self) -> None:
        """Start a new attempt: with the ranks that are left, and a new one for each dead one."""
        survival, began = self._survival, time.monotonic()
        assert survival is not None
        everyone = set(range(len(self._members)))
        for rank in self._dead:
            self._members[rank].end()  # others wait for one that hangs
        while waited := everyone - {*self._dead, *self._lost, *self._results}:
            left = began + TIMEOUTS.regroup_s - time.monotonic()
            if left <= 0:
                break
            self._poll(waited, left)
            if self._failures:
                raise self._cause(waited)
        moment = survival.copies.newest
        here = set() if moment is None else {*self._lost}
        for rank in everyone - here:
            self._members[rank].end()
        first = min((*self._dead.values(), *self._lost.values()), key=lambda f: f.is_consequence)
        dead = {self._members[rank].number for rank in self._dead}
        bad = self._recovery.note(dead, -1 if moment is None else moment.step)
        if bad is None:
            raise first.exception()
        gone = bad if survival.replaces else dead
        for heard in (self._results, self._dead, self._lost):
            heard.clear()
        while True:
            self._members = [member for member in self._members if member.number not in gone]
            if not self._members:
                raise first.exception()
            survival.copies.attempt.value += 1
            args = survival.begin(len(self._members), first.message, moment)
            new = [rank for rank, member in enumerate(self._members) if member.process is None]
            try:
                self.start(new, args)
                break
            except OSError:  # there is no room for another process
                gone = {next(m.number for m in self._members if m.process is None)}
                for rank in new:
                    self._members[rank].end()
        for rank, member in enumerate(self._members):
            if rank not in new:
                order = RankTask(rank, len(self._members), self._attempt, args)
                with suppress(OSError):  # it has died meanwhile, as will be heard
                    member.pipe.send_bytes(pickle.dumps(order))

    def _death(self, rank: int) -> Failure:
        process = self._members[rank].process
        assert process is not None
        process.join(TIMEOUTS.cause_s)
        code = process.exitcode
        how = (
            f"was killed by signal {-code} ({signal.Signals(-code).name})"
            if code is not None and code < 0
            else f"ended with exit code {code} without a word"
        )
        message = f"rank {rank} {how} {describe_position(self._page(rank))}"
        if code in _OUT_OF_MEMORY and not waits(self._page(rank)):
            message += "; if memory ran out, use a smaller micro-batch or more devices"
        return Failure(rank, StageFailedError.__name__, message, "", is_consequence=False)

    def _cause(self, pending: set[int]) -> AnabranchError:
        """Return the failure to raise, once it is certain that no better one is on its way."""
        deadline = time.monotonic() + TIMEOUTS.cause_s
        while pending and all(failure.is_consequence for failure in self._failures.values()):
            left = deadline - time.monotonic()
            if left <= 0:
                break
            pending -= self._poll(pending, left)
        first = min(self._failures.values(), key=lambda f: (f.is_consequence, f.rank))
        if first.is_consequence and pending:
            return StageFailedError(f"{first.message}; still busy: {self._places(pending)}")
        return first.exception()

    def _places(self, ranks: set[int]) -> str:
        return "; ".join(
            f"rank {rank} {describe_position(self._page(rank))}" for rank in sorted(ranks)
        )

    def _page(self, rank: int) -> memoryview:
        return self._pages[rank * HEARTBEAT_INTS : (rank + 1) * HEARTBEAT_INTS]

    def stop(self) -> None:
        """End every process, in a second at most."""
        done = len(self._results) == len(self._members)
        for member in self._members:
            member.end(5.0 if done else 0.0)


class _RankProcess:
    """Process of a rank, if one runs, and its pipe; ``number``: index of its device in the plan."""

    pipe: Connection

    def __init__(self, number: int) -> None:
        self.number = number
        self.process: ForkProcess | None = None

    def end(self, patience_s: float = 0.0) -> None:
        """End the process, if it has not ended by then."""
        process, self.process = self.process, None
        if process is not None:
            if patience_s:
                process.join(patience_s)
            process.kill()  # also one that SIGSTOP holds up
            process.join()
            process.close()
            self.pipe.close()
