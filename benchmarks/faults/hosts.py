"""Two hosts, as network namespaces of this machine, whose link is cut in the middle of training."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

TIMEOUT_S = 5.0
_PORT, _START_S = 29600, 90.0
ADDRESSES = "10.77.0.1", "10.77.0.2"

_TRAIN = """
import os, sys, time
from pathlib import Path
from itertools import count
from tests.runtime.small import batch, built, plan
from anabranch.runtime.pipeline import Pipeline

model = built("TwoBranch")
pipe = Pipeline(model.workload, plan(model, 2), captured=model.captured, timeout=120,
                stall_timeout=float(sys.argv[2]))
for step in count():
    pipe.step(batch(16, step))
    Path(sys.argv[1]).joinpath(f"rank-{pipe.rank}").write_text(str(step))
    time.sleep(0.02)
"""


def missing() -> str:
    """Why there can be no namespaces here; empty if there can."""
    if sys.platform != "linux":
        return "network namespaces are Linux's"
    if os.geteuid() != 0:
        return "network namespaces need root"
    absent = [name for name in ("ip", "unshare") if shutil.which(name) is None]
    return f"there is no {' and no '.join(absent)} (iproute2, util-linux)" if absent else ""


def _ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout


@contextmanager
def two_hosts() -> Iterator[tuple[str, str]]:
    """Names of two namespaces with a link between them, ``link0`` in each."""
    names = f"anabranch-{os.getpid()}-a", f"anabranch-{os.getpid()}-b"
    try:
        for name in names:
            _ip("netns", "add", name)
        _ip("link", "add", "link0", "netns", names[0], "type", "veth",
            "peer", "name", "link0", "netns", names[1])  # fmt: skip
        for name, address in zip(names, ADDRESSES, strict=True):
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", "link0")
            for device in ("lo", "link0"):
                _ip("-n", name, "link", "set", device, "up")
        yield names
    finally:
        for name in names:
            with contextlib.suppress(subprocess.CalledProcessError):
                # torchrun's ranks are in sessions of their own.
                for number in map(int, _ip("netns", "pids", name).split()):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(number, signal.SIGKILL)
                _ip("netns", "del", name)


def _start(number: int, namespace: str, script: Path, folder: Path) -> subprocess.Popen[str]:
    """torchrun with one rank, in a namespace that has a host name of its own."""
    root = Path(__file__).parents[2]
    environment = os.environ | {
        "PYTHONPATH": f"{root}{os.pathsep}{root / 'src'}",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "link0",
    }
    torchrun = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1",
        "--rdzv-backend", "c10d", "--rdzv-id", "cut",
        "--rdzv-endpoint", f"{ADDRESSES[0]}:{_PORT}",
        "--rdzv-conf", f"is_host={'true' if number == 0 else 'false'}",
        "--local-addr", ADDRESSES[number], str(script), str(folder), str(TIMEOUT_S),
    ]  # fmt: skip
    inside = f"hostname host{number} && exec {' '.join(torchrun)}"
    command = ["ip", "netns", "exec", namespace, "unshare", "--uts", "sh", "-c", inside]
    return subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def cut(count: int) -> dict[str, Any]:
    """Seconds from the cut until the ranks of both hosts say why they end, and what they say."""
    if why := missing():
        return {"skipped": why}
    found: dict[str, Any] = {"cuts": 0, "timeout, s": TIMEOUT_S}
    late: dict[int, list[float]] = {0: [], 1: []}
    said: dict[int, str] = {}
    for _ in range(min(count, 5)):
        with tempfile.TemporaryDirectory() as name, two_hosts() as hosts:
            folder, script = Path(name), Path(name) / "train.py"
            script.write_text(_TRAIN)
            runs = [_start(i, host, script, folder) for i, host in enumerate(hosts)]
            try:
                _wait_for_steps(folder, runs)
                _ip("-n", hosts[0], "link", "set", "link0", "down")
                began = time.monotonic()
                for number, (after_s, text) in enumerate(_first_words(runs, began)):
                    late[number].append(after_s - TIMEOUT_S)
                    said[number] = text
                found["cuts"] += 1
            finally:
                for run in runs:
                    run.kill()
                    run.wait()
                    assert run.stderr is not None
                    run.stderr.close()
    for number in (0, 1):
        found[f"host {number}, after the timeout, most s"] = round(max(late[number]), 1)
        found[f"host {number} says"] = said[number]
    return found


def _wait_for_steps(folder: Path, runs: list[subprocess.Popen[str]]) -> None:
    deadline = time.monotonic() + _START_S
    files = [folder / f"rank-{rank}" for rank in range(2)]
    while not all(file.exists() and int(file.read_text() or 0) > 20 for file in files):
        if time.monotonic() > deadline or any(run.poll() is not None for run in runs):
            for run in runs:
                run.kill()
            raise RuntimeError("\n".join((run.communicate()[1] or "")[-2000:] for run in runs))
        time.sleep(0.1)


def _first_words(runs: list[subprocess.Popen[str]], began: float) -> Iterator[tuple[float, str]]:
    """When each host's rank first says why it ends, and the line."""
    import selectors

    text: dict[int, str] = {0: "", 1: ""}
    when: dict[int, tuple[float, str]] = {}
    with selectors.DefaultSelector() as chosen:
        for number, run in enumerate(runs):
            assert run.stderr is not None
            os.set_blocking(run.stderr.fileno(), False)
            chosen.register(run.stderr, selectors.EVENT_READ, number)
        while len(when) < 2 and time.monotonic() - began < 120.0:
            for key, _ in chosen.select(0.2):
                text[key.data] += os.read(key.fd, 65536).decode()
            for number in text:
                words = r"^(StageFailedError: .*|.*PeerLost.*)$"
                line = re.search(words, text[number], re.MULTILINE)
                if line and number not in when:
                    when[number] = time.monotonic() - began, line[1]
    for number in range(2):
        yield when.get(number, (float("inf"), f"nothing: {text[number][-500:]}"))
