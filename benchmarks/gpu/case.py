"""Cases: the parts of a section, each in processes of its own, so that a hang or a crash of one
loses nothing of the others.

A case runs on one rank or on several. Ranks are interpreters of their own with the environment that
torchrun would give them: a process that has used CUDA cannot be forked, and torchrun would end the
ranks whose own end is to be watched. Each writes its rows, as soon as it has them, to one file of
JSON lines; what went wrong is a row as well.

python -m benchmarks.gpu.case SECTION CASE DEVICE FILE     one rank of a case
"""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

Row = dict[str, Any]

ROOT = Path(__file__).parents[2]
SHOWN = 3000
"""Last characters of a rank's output that are kept where it fails."""

ALONE_S = 20.0
"""How long a rank may go on when another one has failed."""

REHEARSAL = 4.0
"""How many times as long a case may take in a rehearsal, which may share two cores with others."""


@dataclass(frozen=True)
class Case:
    """One case.

    Attributes:
        name: its own, in its section.
        ranks: processes.
        limit_s: seconds after which it is killed.
        environment: variables that are set for it.
        loses_a_rank: the last rank ends or stops on purpose, and when the first one ends is
            measured.
        left_out: why it does not run here; empty if it does.
    """

    name: str
    ranks: int = 1
    limit_s: float = 75.0
    environment: Mapping[str, str] = field(default_factory=dict)
    loses_a_rank: bool = False
    left_out: str = ""


def section_named(name: str) -> ModuleType:
    """The module of a section: its ``cases(device)``, and ``measure(case, device)``."""
    return importlib.import_module(f"benchmarks.gpu.{name.replace('-', '_')}")


def write(file: Path, row: Row) -> None:
    """Append a row."""
    with file.open("a") as lines:
        lines.write(json.dumps(row, default=str) + "\n")


def read(file: Path) -> list[Row]:
    """All rows until now; the last line of a rank that was killed may be half of one."""
    rows = []
    for line in file.read_text().splitlines() if file.exists() else ():
        with suppress(json.JSONDecodeError):
            rows.append(json.loads(line))
    return rows


def first_gpu() -> dict[str, str]:
    """The environment in which there is one GPU, which all ranks share."""
    return {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]}


def run(section: str, case: Case, device: str, file: Path, seconds: float) -> None:
    """Run a case; ``seconds`` is what is left of its section's time."""
    told: Row = {"section": section, "case": case.name}
    if case.left_out:
        write(file, told | {"left_out": case.left_out})
        return
    slower = REHEARSAL if device == "cpu" else 1.0
    limit = min(case.limit_s * slower, seconds)
    with tempfile.TemporaryDirectory(prefix="anabranch-gpu-") as folder:
        logs = [Path(folder) / f"rank{rank}" for rank in range(case.ranks)]
        ranks = _start(section, case, device, file, logs)
        try:
            ended = _wait(ranks, case, time.time() + limit)
        finally:
            _kill(ranks)
        words = [log.read_text(errors="replace")[-SHOWN:] for log in logs]
    if case.loses_a_rank:
        own = [row for row in read(file) if told.items() <= row.items()]
        lost = [row["lost_at"] for row in own if "lost_at" in row]
        if lost and 0 in ended:
            told |= {"ended_after_s": ended[0] - lost[0], "exit": ranks[0].returncode}
            write(file, told | {"words": _last_line(words[0]), "output": words[0]})
            return
    for rank, process in enumerate(ranks):
        if rank not in ended:
            failed = f"rank {rank} was killed after {limit:.0f} s"
        elif process.returncode:
            failed = f"rank {rank} ended with {process.returncode}: {_last_line(words[rank])}"
        else:
            continue
        write(file, told | {"failed": failed, "output": words[rank]})


def _start(
    section: str, case: Case, device: str, file: Path, logs: list[Path]
) -> list[subprocess.Popen[bytes]]:
    threads = 1 if device == "cpu" else min(max((os.cpu_count() or 1) // case.ranks, 1), 16)
    shared = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": str(threads),
        **case.environment,
    }
    if case.ranks > 1:
        shared |= {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(_free_port()),
            "WORLD_SIZE": str(case.ranks),
            "TORCHELASTIC_RUN_ID": "benchmark",  # ranks report as they do under torchrun
        }
    processes = []
    for rank, log in enumerate(logs):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if case.ranks > 1 else {}
        with log.open("wb") as output:
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", __name__, section, case.name, device, str(file)],
                    cwd=ROOT,
                    env=shared | own,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )
    return processes


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def _wait(ranks: list[subprocess.Popen[bytes]], case: Case, deadline: float) -> dict[int, float]:
    """Rank -> when it ended by itself; without those that did not."""
    ended: dict[int, float] = {}
    while len(ended) < len(ranks) and time.time() < deadline:
        for rank, process in enumerate(ranks):
            if rank not in ended and process.poll() is not None:
                ended[rank] = time.time()
                if process.returncode and not case.loses_a_rank:
                    deadline = min(deadline, time.time() + ALONE_S)
        if case.loses_a_rank and 0 in ended:
            break
        time.sleep(0.05)
    return ended


def _kill(ranks: list[subprocess.Popen[bytes]]) -> None:
    """End what still runs, with its own children; politely first, for those that have some."""
    for number, patience_s in ((signal.SIGTERM, 5.0), (signal.SIGKILL, 10.0)):
        running = [process for process in ranks if process.poll() is None]
        for process in running:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)
        for process in running:
            with suppress(subprocess.TimeoutExpired):
                process.wait(patience_s)


def _last_line(output: str) -> str:
    """The last error, or whatever comes last: libraries may warn after an error."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [
        line for line in lines if re.match(r"(\[rank\d+\]: )?[\w.]*(Error|Exception)\b", line)
    ]
    return ["", *lines, *errors][-1][:300] or "without a word"


def main() -> None:
    """One rank of a case."""
    section, case, device, file = sys.argv[1:]
    measure = section_named(section).measure
    import torch  # takes seconds, which who starts ranks, or names a wrong section, need not wait

    rank = int(os.environ.get("RANK", "0"))
    device = torch.device("cpu")
    torch.set_float32_matmul_precision("highest")  # no TF32: the CPU has none
    if device == "cuda":
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    for row in measure(case, device):
        write(Path(file), {"section": section, "case": case, "rank": rank, **row})


if __name__ == "__main__":
    main()
