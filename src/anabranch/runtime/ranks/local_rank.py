"""A local rank, from start to end, in a process that ``launch`` forks."""

from __future__ import annotations

import ctypes
import gc
import os
import pickle
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore

from anabranch.runtime.guards.failure import Failure
from anabranch.runtime.guards.heartbeat import HEARTBEAT_INTS, share
from anabranch.runtime.guards.interrupt import INTERRUPT
from anabranch.runtime.guards.position import POSITION, Phase
from anabranch.runtime.ranks.process_groups import LOOPBACK
from anabranch.runtime.transport import guarded


@dataclass(frozen=True, slots=True)
class RankTask:
    """Place of a rank among ``size`` in an attempt, and the arguments of its function."""

    rank: int
    size: int
    attempt: int
    args: tuple[Any, ...]


def run_rank(
    order: RankTask,
    device: int,
    store: Path,
    pipe: Connection,
    pages: memoryview,
    flag: memoryview,
    parent: int,
    *,
    function: Callable[..., Any],
    survives: bool,
) -> None:
    gc.freeze()  # to look for garbage in what is inherited would copy all of it
    _die_with(parent)
    # Ctrl-C reaches the whole process group, SIGTERM may; the parent hears it too, and tells or
    # stops the ranks.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _leave_to_parent(signal.SIGTERM)
    torch.set_num_threads(1)
    os.environ["LOCAL_RANK"] = str(device)
    if survives:
        # Processes that load data would keep the sockets of a dead rank open.
        os.register_at_fork(after_in_child=lambda: _die_with(os.getppid()))
    while True:
        share(pages[order.rank * HEARTBEAT_INTS : (order.rank + 1) * HEARTBEAT_INTS])
        POSITION.begin(-1, Phase.START_UP)
        INTERRUPT.share(flag)
        try:
            _connect(order, store)
            POSITION.leave()
            reply = pickle.dumps((function(*order.args),))
            break
        except BaseException as error:
            failure = Failure.of(error, order.rank)
            if not (survives and failure.is_consequence):
                _say(pipe, pickle.dumps(failure))
                # Threads that wait for messages must not hold up the end of the process.
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(1)
        # Here nothing refers to the frames of the failure any more, and what they held.
        if dist.is_initialized():
            dist.destroy_process_group()
        _say(pipe, pickle.dumps(failure))
        gc.collect()
        try:
            order = pickle.loads(pipe.recv_bytes())
        except (EOFError, ConnectionResetError):
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


def _connect(order: RankTask, store: Path) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = LOOPBACK
    with POSITION.waiting():
        guarded(
            lambda: dist.init_process_group(
                "gloo",
                store=PrefixStore(str(order.attempt), FileStore(str(store), order.size)),
                rank=order.rank,
                world_size=order.size,
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
