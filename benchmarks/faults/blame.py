"""One rank of three that sleeps, is stopped or blocks, in every part of training: who is named.

The other ranks wait for it, directly or behind one another, and must not be blamed.
"""

from __future__ import annotations

import os
import re
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice, product
from pathlib import Path
from typing import Any

import torch

import anabranch
from anabranch import launch
from anabranch.checkpoint import saving
from anabranch.cluster import Cluster
from anabranch.errors import StageFailedError
from anabranch.models import build
from anabranch.plans.plan import Plan
from anabranch.runtime.compute.stage_compute import StageCompute
from anabranch.runtime.plan_parts import prepare
from anabranch.runtime.ranks.mesh import Mesh
from anabranch.runtime.state.model_state import ModelState
from anabranch.training import train
from anabranch.workload import Batch, Workload

RANKS, STEPS, TIMEOUT_S = 3, 6, 2.0

PLACES = (
    "start-up",
    "first step",
    "loader",
    "module",
    "backward",
    "all-reduce",
    "optimizer",
    "held-out data",
    "evaluation",
    "save",
    "write",
)
"""Parts of training in which a rank can be held up."""


def _block() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


HOWS: dict[str, Callable[[], None]] = {
    "sleep": lambda: time.sleep(3600),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "block": _block,
}
"""Name -> what holds this process up."""


@dataclass
class Fault:
    """One rank that is held up at one place, the third time that it comes there.

    Attributes:
        marker: a file with the time at which that was.
    """

    place: str
    how: str
    rank: int
    marker: Path

    def __post_init__(self) -> None:
        self._times = 0

    def strike(self, place: str) -> None:
        """Hold this rank up if this is the place."""
        if place != self.place or os.environ["LOCAL_RANK"] != str(self.rank):
            return
        self._times += 1
        once = place in ("start-up", "first step", "held-out data", "evaluation", "save", "write")
        if self._times == (1 if once else 3):
            self.marker.write_text(str(time.monotonic()))
            HOWS[self.how]()

    def patched(self) -> None:
        """Strike inside of the library as well; called in a forked rank."""

        def before(kind: type, name: str, place: Callable[..., str]) -> None:
            original = getattr(kind, name)

            def struck(*args: Any, **options: Any) -> Any:
                self.strike(place(*args))
                return original(*args, **options)

            setattr(kind, name, struck)

        before(StageCompute, "backward", lambda *_: "backward")
        before(StageCompute, "forward", self._forward)
        before(Mesh, "start_all_reduce", lambda *_: "all-reduce")
        before(ModelState, "part", lambda *_: "save")
        write = saving.write_part

        def slowly(*args: Any) -> Any:
            self.strike("write")
            return write(*args)

        saving.write_part = slowly

    def _forward(self, compute: Any, *_: Any) -> str:
        if not compute._train:
            return "evaluation"
        return "first step" if self.place == "first step" else "module"


@cache
def case_of(planner: str) -> tuple[Workload, Any, Plan]:
    """Return the small two-branch model as stages in a row, or as three replicas of one."""
    workload = build("two-branch", preset="small")
    captured = anabranch.capture(workload.module, workload.example)
    profile = anabranch.measure(captured, (1, 2, 4), repeats=1)
    replicas = RANKS if planner == "data-parallel" else 1
    plan = anabranch.plan(
        profile, Cluster.preset(f"local:{RANKS}"), 12, planner=planner, max_replicas=replicas
    )
    prepare(captured, plan.stage_graph, workload)
    return workload, captured, plan


def blamed(place: str, how: str, rank: int, planner: str = "sequential") -> tuple[str, float]:
    """Return what is told of a rank that is held up, and seconds until it is known."""
    workload, captured, plan = case_of(planner)
    assert workload.data is not None
    batches = list(islice(workload.data(12, 0), 9))
    with tempfile.TemporaryDirectory() as folder:
        fault = Fault(place, how, rank, Path(folder) / "struck")

        def data(batch_size: int, epoch: int) -> Iterator[Batch]:
            for batch in batches:
                fault.strike("loader")
                yield batch

        def held_out(batch_size: int) -> Iterator[Batch]:
            fault.strike("held-out data")
            yield from batches[:2]

        class Struck(torch.optim.AdamW):
            def step(self, closure: Any = None) -> Any:
                fault.strike("optimizer")
                return super().step(closure)

        def optimizer(parameters: Any) -> torch.optim.Optimizer:
            fault.strike("start-up")
            return Struck(parameters, lr=1e-3)

        def run() -> None:
            fault.patched()
            train(
                replace(workload, data=data, eval_data=held_out, optimizer=optimizer),
                plan,
                captured=captured,
                steps=STEPS,
                save=Path(folder) / "run",
                check_gradients=False,
            )

        told = "nobody"
        try:
            launch.run(
                run, RANKS, stall_timeout=TIMEOUT_S, patience=TIMEOUT_S, timeout=TIMEOUT_S + 20
            )
        except StageFailedError as error:
            told = str(error)
        ended = time.monotonic()
        if not fault.marker.exists():
            return f"never held up, but {told}", 0.0
        return told, ended - float(fault.marker.read_text())


def blame(count: int, first: int = 0) -> dict[str, Any]:
    """Every place x how x the first or the last rank, of stages in a row and of replicas."""
    cases = list(product(("sequential", "data-parallel"), PLACES, HOWS, (0, RANKS - 1)))
    right, late, wrong = 0, list[float](), list[str]()
    cases = cases[first : first + count]
    for planner, place, how, rank in cases:
        told, seconds = blamed(place, how, rank, planner)
        late.append(seconds - TIMEOUT_S)
        if re.match(f"rank {rank} has not gone on", told):
            right += 1
        else:
            wrong.append(f"{planner}, {how} in {place} of rank {rank}: {told[:200]}")
    return {
        "held up": len(cases),
        "named right": right,
        "after the timeout, median s": round(statistics.median(late), 2),
        "most, s": round(max(late), 2),
        "wrong": wrong,
    }
