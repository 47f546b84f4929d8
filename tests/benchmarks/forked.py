"""Ranks of the benchmark of GPUs as forks of this process, which has imported torch already."""

import gc
import os
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from typing import Any, BinaryIO

from benchmarks.gpu import case

STDOUT, TimeoutExpired = subprocess.STDOUT, subprocess.TimeoutExpired


class Popen:
    """What ``case`` uses of ``subprocess.Popen``."""

    def __init__(
        self, command: Sequence[str], *, env: Mapping[str, str], stdout: BinaryIO, **_: Any
    ) -> None:
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            os._exit(_run(command, env, stdout))

    def poll(self) -> int | None:
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if ended else None
        return self.returncode

    def wait(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise TimeoutExpired("a fork", timeout)
            time.sleep(0.02)


def _run(command: Sequence[str], environment: Mapping[str, str], output: BinaryIO) -> int:
    """The fork: ``python -m module arguments``; its exit code."""
    try:
        gc.freeze()
        os.setsid()
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        os.environ.clear()
        os.environ.update(environment)
        sys.argv = list(command[2:])
        with open(1, "w") as stdout, open(2, "w") as stderr, warnings.catch_warnings():
            warnings.simplefilter("default")
            with redirect_stdout(stdout), redirect_stderr(stderr):
                try:
                    case.main()
                    return 0
                except BaseException:
                    traceback.print_exc()
                    return 1
    except BaseException:
        return 1
