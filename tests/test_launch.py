"""Local ranks: results, and above all ends. Every test has a limit of its own inside ``run``."""

import gc
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.run
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

from anabranch import launch
from anabranch.errors import DataError, StageFailedError
from anabranch.files import save_plan
from anabranch.runtime.guards.interrupt import INTERRUPT
from anabranch.runtime.guards.position import POSITION
from tests.runtime.small import built, plan

pytestmark = pytest.mark.dist

LIMIT_S = 30.0


def test_results_come_back_by_rank() -> None:
    """A closure runs in every rank, the ranks can talk, and each returns its own result."""
    factor = 3

    def work(offset: int) -> tuple[int, float]:
        total = torch.tensor([float(dist.get_rank())])
        dist.all_reduce(total)
        return dist.get_rank() * factor + offset, total.item()

    assert launch.run(work, 3, 1, timeout=LIMIT_S) == [(1, 3.0), (4, 3.0), (7, 3.0)]


def test_a_rank_looks_for_garbage_in_what_is_its_own() -> None:
    """What it inherits is copied as soon as it is looked at: seconds, of a large parent."""
    inherited = [[] for _ in range(1000)]

    def work() -> int:
        return sum(each is inherited for each in gc.get_objects())

    assert work() == 1
    assert launch.run(work, 1, timeout=LIMIT_S) == [0]


def test_a_rank_computes_although_the_parent_used_threads() -> None:
    """The threads of the parent's pool do not exist in a rank, which must not wait for them."""
    matrix = torch.randn(600, 600)
    torch.set_num_threads(2)
    try:
        matrix @ matrix
    finally:
        torch.set_num_threads(1)

    def work() -> tuple[int, bool]:
        leaf = torch.randn(600, 600, requires_grad=True)
        (leaf @ matrix).sum().backward()
        return torch.get_num_threads(), leaf.grad is not None

    assert launch.run(work, 2, timeout=LIMIT_S) == [(1, True)] * 2


def test_a_rank_that_is_done_at_once_does_not_disturb_the_others() -> None:
    """It used to be gone before the others had connected to it."""
    for _ in range(4):
        assert launch.run(lambda: None, 4, timeout=LIMIT_S) == [None] * 4


def test_the_first_failure_is_raised_with_its_traceback() -> None:
    """The others, who would wait for an hour, are stopped."""

    def work() -> None:
        if dist.get_rank() == 1:
            raise KeyError("no such table")
        time.sleep(3600)

    with pytest.raises(StageFailedError, match=r"rank 1 failed .*no such table") as caught:
        launch.run(work, 3, timeout=LIMIT_S)
    (note,) = caught.value.__notes__
    assert 'raise KeyError("no such table")' in note


def test_our_own_errors_keep_their_class_and_text() -> None:
    def work() -> None:
        raise DataError("the file is empty")

    with pytest.raises(DataError) as caught:
        launch.run(work, 2, timeout=LIMIT_S)
    assert str(caught.value) == "the file is empty"


def test_a_killed_rank_is_named() -> None:
    """It cannot say so itself, and those who notice report the consequence only."""

    def work() -> None:
        if dist.get_rank() == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()

    with pytest.raises(StageFailedError, match=r"rank 2 was killed by signal 9 \(SIGKILL\)"):
        launch.run(work, 3, timeout=LIMIT_S)


@pytest.mark.parametrize("is_waiting", [False, True])
def test_memory_is_named_only_where_it_may_be_the_cause(is_waiting: bool) -> None:
    """Not where a rank only waits for another one."""

    def work() -> None:
        with POSITION.waiting() if is_waiting else nullcontext():
            os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(StageFailedError, match="rank 0 was killed by signal 9") as caught:
        launch.run(work, 1, timeout=LIMIT_S)
    assert ("memory" in str(caught.value)) != is_waiting


def test_a_rank_that_exits_without_a_result_is_named() -> None:
    def work() -> None:
        os._exit(7)

    with pytest.raises(StageFailedError, match="rank 0 ended with exit code 7"):
        launch.run(work, 1, timeout=LIMIT_S)


def test_the_limit_says_who_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1; by a clock on which half a second has passed when rank 0 is done, and not before."""
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)

    def wait_for_one(pipes: list[Connection], limit: float) -> list[object]:
        ready = wait(pipes, LIMIT_S)
        clock.now += 1.0
        return ready

    monkeypatch.setattr(launch, "time", clock)
    monkeypatch.setattr(launch, "wait", wait_for_one)

    def work() -> None:
        dist.barrier()  # both have started
        if dist.get_rank() == 1:
            time.sleep(3600)

    with pytest.raises(StageFailedError, match=r"within 0.5 s; rank 1 outside of the steps$"):
        launch.run(work, 2, timeout=0.5)


def test_a_result_that_cannot_be_pickled_is_an_error() -> None:
    with pytest.raises(StageFailedError, match="pickle"):
        launch.run(lambda: lambda: None, 1, timeout=LIMIT_S)


def test_no_ranks_make_no_sense() -> None:
    with pytest.raises(ValueError, match="0 ranks"):
        launch.run(print, 0)


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_rank_outlives_the_parent(ending: signal.Signals, tmp_path: Path) -> None:
    """However the parent ends, and nothing is left in the folder for temporary files. It is a fork
    here, which starts faster than an interpreter.
    """
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)

    def rank() -> None:
        send.send(os.getpid())
        time.sleep(3600)

    def parent() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
        tempfile.tempdir = str(tmp_path)
        launch.run(rank, 2)

    process = context.Process(target=parent)
    process.start()
    ranks = [receive.recv() for _ in range(2)]
    assert process.pid is not None
    os.kill(process.pid, ending)
    process.join(LIMIT_S)
    assert not process.is_alive()
    assert wait_until(lambda: not any(map(is_running, ranks)))
    assert list(tmp_path.iterdir()) == []


def interrupted(times: int, number: signal.Signals) -> tuple[int, int, bool]:
    """Rank 1 sends a signal to its parent, each time when the one before has been heard, and then
    waits for ever unless the first is to be heard by the ranks: how often the parent answered,
    what the ranks returned in sum, and whether it ended with a KeyboardInterrupt.
    """
    answers = []

    def rank() -> int:
        os.kill(os.getpid(), signal.SIGTERM)  # some send it to all processes: it is the parent's
        if dist.get_rank() == 1:
            os.kill(os.getppid(), number)
        assert wait_until(lambda: INTERRUPT.heard, LIMIT_S)
        if dist.get_rank() == 1 and times > 1:
            os.kill(os.getppid(), number)
        if times > 1:
            time.sleep(3600)
        return 1

    before = {
        signal.SIGINT: signal.signal(signal.SIGINT, signal.default_int_handler),
        signal.SIGTERM: signal.signal(signal.SIGTERM, signal.SIG_DFL),
    }
    try:
        results = launch.run(rank, 2, timeout=LIMIT_S, on_interrupt=lambda: answers.append(1))
    except KeyboardInterrupt:
        return len(answers), 0, True
    finally:
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        for each, handler in before.items():
            signal.signal(each, handler)
    return len(answers), sum(results), False


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_ctrl_c_may_be_for_the_ranks_to_hear(number: signal.Signals) -> None:
    """All of them hear it, they end on their own, and afterwards signals are what they were.
    SIGTERM, which batch systems send, is as good.
    """
    assert interrupted(1, number) == (1, 2, False)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_second_ctrl_c_ends_ranks_that_do_not(number: signal.Signals) -> None:
    """At once, however long they would take."""
    assert interrupted(2, number) == (1, 0, True)


def test_a_stopped_rank_is_ended() -> None:
    """It hears no signal but the last one."""

    def work() -> None:
        if dist.get_rank() == 1:
            raise KeyError("no such table")
        os.kill(os.getpid(), signal.SIGSTOP)

    with pytest.raises(StageFailedError, match="no such table"):
        launch.run(work, 2, timeout=LIMIT_S)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition: object, limit: float = LIMIT_S) -> bool:
    assert callable(condition)
    end = time.monotonic() + limit
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


SCRIPT = r"""
import os, signal
from tests.runtime.small import batch, built
from anabranch.cli.torchrun import is_restarted
from anabranch.compiled import functions
from anabranch.files import load_plan
from anabranch.runtime.pipeline import Pipeline
import anabranch.training

model = built("TwoBranch")
functions.Compiled.__call__ = None  # half a second for nothing where a plan is at hand
pipe = Pipeline(model.workload, load_plan("plan.json"), captured=model.captured, timeout=30)
pipe.step(batch(16))
if not is_restarted() and pipe.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
for step in range(2):
    os.write(1, f"loss {pipe.step(batch(16))}\n".encode())  # one write, so that lines stay whole
bad = batch(16)
bad["word"][9] = 99  # no such row in the embedding, which is on rank 0
pipe.step(bad)
"""


class Fork:
    """What torchrun uses of ``subprocess.Popen``, for ``python -u script``, and torchrun itself:
    forks of this process, which has imported torch and captured the model already.
    """

    def __init__(
        self, args: Sequence[str], env: Mapping[str, str], main: Any = None, **options: Any
    ) -> None:
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            try:
                self._run(main or partial(runpy.run_path, args[-1], run_name="__main__"), env)
            finally:
                os._exit(1)

    def _run(self, main: Callable[[], object], env: Mapping[str, str]) -> None:
        gc.freeze()
        os.setsid()
        for name in os.environ.keys() - env.keys():
            del os.environ[name]
        os.environ.update(env)
        sys.stdout, sys.stderr = (os.fdopen(file, "w", 1, closefd=False) for file in (1, 2))
        warnings.simplefilter("default")
        warnings.showwarning = lambda message, *_: print(message, file=sys.stderr)  # noqa: T201
        try:
            main()
        except BaseException:
            sys.excepthook(*sys.exc_info())
            sys.stderr.flush()
            os._exit(1)
        os._exit(0)

    def poll(self) -> int | None:
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if ended else None
        return self.returncode

    def wait(self, timeout: float) -> int:
        if not wait_until(lambda: self.poll() is not None, timeout):
            os.killpg(self.pid, signal.SIGKILL)
            raise subprocess.TimeoutExpired("a fork", timeout)
        assert self.returncode is not None
        return self.returncode


def test_a_loop_of_the_user_runs_under_torchrun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank is killed, and torchrun starts both again: the store keeps what they wrote, their
    addresses and the failure, and who read them would end, or wait for ever. Then losses are the
    same on both ranks, until one fails: it says why, once, and the exit code is 1.
    """
    save_plan(plan(built("TwoBranch"), 2), tmp_path / "plan.json")
    (tmp_path / "train.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(subprocess_handler, "Popen", Fork)
    options = ["--standalone", "--max-restarts", "1", "--nproc-per-node", "2", "train.py"]

    def torchrun() -> None:
        for number, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(name, os.O_CREAT | os.O_WRONLY), number)
        torch.distributed.run.main(options)

    code = Fork([], os.environ, main=torchrun).wait(120)
    out, err = ((tmp_path / name).read_text() for name in ("out", "err"))
    losses = [line.split()[1] for line in out.splitlines() if line.startswith("loss")]
    assert len(losses) == 4, err
    assert len(set(losses)) == 2
    assert code == 1
    assert err.count("the store of torchrun listens on port") == 2  # once an attempt
    cause = [line for line in err.splitlines() if "StageFailedError: rank" in line]
    assert len(cause) == 1, err
    assert "in the forward of stage 0, micro-batch 2, step 3: IndexError" in cause[0]
