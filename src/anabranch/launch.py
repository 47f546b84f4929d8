"""Local ranks: one process per device of a plan, forked with torch and the model already in memory.

Starting an interpreter and importing torch takes seconds, a fork milliseconds, and memory that no
rank writes is shared by all of them::

    parent ----fork----> rank 0 --+
       |  ---fork----> rank 1     |  shared memory and Gloo; they meet through a file
       |  ---fork----> rank 2   --+
       +<---- a pipe each: result or failure; a few shared integers each: where the rank is,
                        and with which batches

The parent takes the first failure that is a cause, stops the other ranks, and raises it. Ranks
never outlive the parent: the kernel kills them when it dies (Linux).

A fork copies only the calling thread; a lock that another thread holds stays held in the ranks.
torch's CPU threads are safe: a rank computes on one thread, so it never asks for them.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from anabranch.errors import AnabranchError, StageFailedError
from anabranch.runtime.guards.agreement import version
from anabranch.runtime.guards.failure import Failure
from anabranch.runtime.guards.heartbeat import HEARTBEAT_INTS, Watch, place_text, share
from anabranch.runtime.guards.interrupt import INTERRUPT, handling
from anabranch.runtime.guards.position import POSITION, Phase
from anabranch.runtime.guards.timeouts import TIMEOUTS
from anabranch.runtime.process_groups import LOOPBACK
from anabranch.runtime.transport import guarded

if TYPE_CHECKING:
    from multiprocessing.context import ForkProcess

Result = TypeVar("Result")


def run(
    function: Callable[..., Result],
    num_ranks: int,
    *args: Any,
    timeout: float | None = None,
    stall_timeout: float | None = None,
    patience: float | None = None,
    on_interrupt: Callable[[], None] | None = None,
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
    with _meeting_place() as store, _telling(flag, on_interrupt):
        ranks = _Ranks(pages, flag)
        try:
            ranks.start(function, args, num_ranks, store)
            return ranks.collect(timeout, stall_timeout, patience)
        finally:
            ranks.stop()


@contextmanager
def _meeting_place() -> Iterator[Path]:
    """A file through which the ranks meet: in memory, so that nothing is left of it however this
    process ends, or where there are no such files in a folder of its own.
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
def _telling(flag: memoryview, on_interrupt: Callable[[], None] | None) -> Iterator[None]:
    """Inside, the first Ctrl-C or SIGTERM sets a flag, and only the second is obeyed at once, as a
    KeyboardInterrupt.
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


class _Ranks:
    """The parent's side: processes, their pipes, what they said."""

    def __init__(self, pages: memoryview, flag: memoryview) -> None:
        self._pages, self._flag = pages, flag
        self._processes: list[ForkProcess] = []
        self._pipes: list[Connection] = []
        self._results: dict[int, Any] = {}
        self._failures: dict[int, Failure] = {}

    def start(
        self, function: Callable[..., Any], args: tuple[Any, ...], num_ranks: int, store: Path
    ) -> None:
        context = multiprocessing.get_context("fork")
        for rank in range(num_ranks):
            ours, theirs = context.Pipe(duplex=False)
            ints, flag, parent = self._page(rank), self._flag, os.getpid()
            process = context.Process(
                target=_main,
                args=(rank, num_ranks, store, theirs, ints, flag, parent, function, args),
                name=f"anabranch rank {rank}",
            )
            with warnings.catch_warnings():
                # Python 3.12 warns of any fork with threads; the module docstring says why this one
                # is safe.
                warnings.simplefilter("ignore", DeprecationWarning)
                process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def collect(
        self, timeout: float | None, stall_timeout: float | None, patience: float | None
    ) -> list[Any]:
        deadline = None if timeout is None else time.monotonic() + timeout
        pending = set(range(len(self._processes)))
        watch = Watch(len(pending), stall_timeout, patience)
        while pending:
            limit = min(TIMEOUTS.look_s, stall_timeout / 4) if stall_timeout else TIMEOUTS.look_s
            if deadline is not None:
                limit = min(limit, max(deadline - time.monotonic(), 0.0))
            pending -= self._hear(pending, limit)
            if problem := self._problem(watch, pending):
                raise problem
            if self._failures:
                raise self._cause(pending)
            if pending and deadline is not None and time.monotonic() >= deadline:
                raise StageFailedError(
                    f"the ranks did not finish within {timeout:g} s; {self._places(pending)}"
                )
        return [self._results[rank] for rank in range(len(self._processes))]

    def _problem(self, watch: Watch, pending: set[int]) -> AnabranchError | None:
        """Return why the ranks cannot go on, as far as their heartbeats tell."""
        now = time.monotonic()
        for rank in range(len(self._processes)):
            watch.note(rank, self._page(rank).tolist(), now, is_done=rank not in pending)
        stopped = {rank for rank in pending if self._is_stopped(rank)}
        return watch.problem(now, stopped, has_failed=bool(self._failures))

    def _is_stopped(self, rank: int) -> bool:
        """Return True if SIGSTOP or a debugger has stopped a process (Linux)."""
        try:
            state = Path(f"/proc/{self._processes[rank].pid}/stat").read_text()
        except OSError:
            return False
        return state.rpartition(")")[2].split()[0] in "Tt"

    def _hear(self, pending: set[int], limit: float | None) -> set[int]:
        """Wait for news, note it, and return the ranks that have ended or are done."""
        # A pipe becomes readable when its rank speaks, and also when it dies without a word.
        ready = wait([self._pipes[rank] for rank in pending], limit)
        heard = {rank for rank in pending if self._pipes[rank] in ready}
        for rank in heard:
            try:
                reply = pickle.loads(self._pipes[rank].recv_bytes())
            except EOFError:
                reply = self._death(rank)
            if isinstance(reply, Failure):
                self._failures[rank] = reply
            else:
                (self._results[rank],) = reply
        return heard

    def _death(self, rank: int) -> Failure:
        process = self._processes[rank]
        process.join(TIMEOUTS.cause_s)
        code = process.exitcode
        how = (
            f"was killed by signal {-code} ({signal.Signals(-code).name})"
            if code is not None and code < 0
            else f"ended with exit code {code} without a word"
        )
        message = (
            f"rank {rank} {how} {place_text(self._page(rank))}; if memory ran out, use a smaller "
            "micro-batch or more devices"
        )
        return Failure(rank, StageFailedError.__name__, message, "", is_consequence=False)

    def _cause(self, pending: set[int]) -> AnabranchError:
        """The failure to raise, once it is certain that no better one is on its way."""
        deadline = time.monotonic() + TIMEOUTS.cause_s
        while pending and all(failure.is_consequence for failure in self._failures.values()):
            left = deadline - time.monotonic()
            if left <= 0:
                break
            pending -= self._hear(pending, left)
        first = min(self._failures.values(), key=lambda f: (f.is_consequence, f.rank))
        if first.is_consequence and pending:
            return StageFailedError(f"{first.message}; still busy: {self._places(pending)}")
        return first.exception()

    def _places(self, ranks: set[int]) -> str:
        return "; ".join(f"rank {rank} {place_text(self._page(rank))}" for rank in sorted(ranks))

    def _page(self, rank: int) -> memoryview:
        return self._pages[rank * HEARTBEAT_INTS : (rank + 1) * HEARTBEAT_INTS]

    def stop(self) -> None:
        """End every process, in a second at most."""
        done = len(self._results) == len(self._processes)
        for process in self._processes:
            if done:
                process.join(5.0)
            process.kill()  # also one that SIGSTOP holds up
        for process in self._processes:
            process.join()
            process.close()
        for pipe in self._pipes:
            pipe.close()


def _main(
    rank: int,
    num_ranks: int,
    store: Path,
    pipe: Connection,
    page: memoryview,
    flag: memoryview,
    parent: int,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    """One rank, from its first instruction to its last word."""
    gc.freeze()  # to look for garbage in what is inherited would copy all of it
    _die_with(parent)
    # Ctrl-C reaches the whole process group, SIGTERM may; the parent hears it too, and tells or
    # stops the ranks.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _leave_to_parent(signal.SIGTERM)
    torch.set_num_threads(1)
    os.environ["LOCAL_RANK"] = str(rank)
    share(page)
    POSITION.begin(-1, Phase.START_UP)
    INTERRUPT.share(flag)
    try:
        _connect(rank, num_ranks, store)
        POSITION.leave()
        reply = pickle.dumps((function(*args),))
    except BaseException as error:
        _say(pipe, pickle.dumps(Failure.of(error, rank)))
        # Threads that wait for messages must not hold up the end of the process.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
    _say(pipe, reply)


def _leave_to_parent(number: signal.Signals) -> None:
    """Do nothing at a signal, but let processes that the user's data forks end with it."""
    process = os.getpid()

    def hear(_: int, frame: FrameType | None) -> None:
        if os.getpid() != process:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    signal.signal(number, hear)
    signal.siginterrupt(number, False)


def _connect(rank: int, num_ranks: int, store: Path) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = LOOPBACK
    with POSITION.waiting():
        guarded(
            lambda: dist.init_process_group(
                "gloo",
                store=FileStore(str(store), num_ranks),
                rank=rank,
                world_size=num_ranks,
                timeout=timedelta(minutes=10),
            )
        )
        # A rank that is done, and gone, before the others have met would look like a failure.
        guarded(dist.barrier)


def _say(pipe: Connection, reply: bytes) -> None:
    try:
        pipe.send_bytes(reply)
    except BrokenPipeError:
        os._exit(1)


def _die_with(parent: int) -> None:
    """Ask the kernel to kill this process when its parent dies, however that happens."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1  # in Linux's header prctl.h
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
