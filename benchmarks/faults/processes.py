"""Processes that are killed or stopped in the middle of training: what is lost, and how soon it is
known.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from anabranch import launch
from anabranch.checkpoint.series import newest, step_of
from anabranch.cli.training.restarts import train_with_restarts
from anabranch.cli.training.training_settings import TrainingSettings
from anabranch.errors import StageFailedError
from anabranch.record import Run
from anabranch.runtime.plan_parts import prepare
from anabranch.training import train
from anabranch.workload import Batch, Workload
from benchmarks.faults.checkpoints import RANKS, planned

STEPS, INTERVAL, TIMEOUT_S = 40, 5, 1.0


class _Job:
    """Training in which one drawn rank gets a signal before one drawn batch, once."""

    def __init__(self, seed: int, number: signal.Signals, folder: Path) -> None:
        drawn = random.Random(seed)
        self.rank, self.step = drawn.randrange(RANKS), drawn.randrange(8, STEPS)
        self._number, self._marker = number, folder / "signalled"
        self.save = folder / "run"

    def attempt(self, made: tuple[Any, Any, Any], asked: TrainingSettings) -> Run:
        workload, captured, plan = made

        def data(batch_size: int, epoch: int) -> Iterator[Batch]:
            for i, batch in enumerate(workload.data(batch_size, epoch)):
                mine = os.environ["LOCAL_RANK"] == str(self.rank)
                if mine and epoch == 0 and i == self.step and not self._marker.exists():
                    self._marker.write_text(str(time.monotonic()))
                    os.kill(os.getpid(), self._number)
                yield batch

        def rank() -> Run:
            return train(
                replace(workload, data=data, eval_data=None),
                plan,
                captured=captured,
                steps=asked.last_step,
                resume=asked.resume,
                save=asked.save,
                save_every=asked.saves(),
                check_gradients=False,
            )

        return launch.run(rank, RANKS, stall_timeout=TIMEOUT_S)[0]

    @property
    def signalled_at(self) -> float:
        """Of the clock that all processes share."""
        return float(self._marker.read_text())


def kills(count: int, first: int = 0) -> dict[str, Any]:
    """SIGKILL at drawn steps: restarts that reach the last step, and steps that are done twice."""
    made, again, gone, reached, named = planned("two-branch", 8), [], [], 0, 0
    count = min(count, 20)
    for seed in range(first, first + count):
        with tempfile.TemporaryDirectory() as name:
            job, said = _Job(seed, signal.SIGKILL, Path(name)), list[str]()
            asked = TrainingSettings(
                steps=STEPS, save=job.save, save_every=str(INTERVAL), max_restarts=1
            )

            def say(text: str, job: _Job = job, said: list[str] = said) -> None:
                gone.append(time.monotonic() - job.signalled_at)  # the ranks have been ended
                said.append(text)

            _, last = train_with_restarts(partial(job.attempt, made), asked, say)
            reached += step_of(newest(job.save) or job.save) == STEPS
            again.append(job.step - (STEPS - (last.last_step or STEPS)))
            named += f"rank {job.rank} was killed by signal 9 (SIGKILL) reading data" in said[0]
    return {
        "killed": count,
        "restarted and reached the last step": reached,
        "rank and phase named": named,
        "steps done twice, median": statistics.median(again),
        "steps done twice, most": max(again),
        "checkpoint every": INTERVAL,
        "all processes gone, most s": round(max(gone), 2),
    }


def hangs(count: int, first: int = 0) -> dict[str, Any]:
    """SIGSTOP at drawn steps: seconds until the rank is named, beyond the timeout."""
    made, late, named = planned("two-branch", 8), [], 0
    count = min(count, 20)
    for seed in range(first, first + count):
        with tempfile.TemporaryDirectory() as name:
            job = _Job(seed, signal.SIGSTOP, Path(name))
            try:
                job.attempt(made, TrainingSettings(steps=STEPS))
            except StageFailedError as error:
                late.append(time.monotonic() - job.signalled_at - TIMEOUT_S)
                named += str(error).startswith(f"rank {job.rank} has not gone on")
    return {
        "stopped": count,
        "rank named first": named,
        "timeout, s": TIMEOUT_S,
        "all processes gone after it, median s": round(statistics.median(late), 2),
        "most, s": round(max(late), 2),
    }


class _Slow:
    """What is slow on one drawn rank, and alive: three times as long as a rank may be silent."""

    KINDS = ("start-up", "first step", "evaluation", "every batch", "save")

    def __init__(self, seed: int) -> None:
        drawn = random.Random(seed)
        self.kind = self.KINDS[seed % len(self.KINDS)]
        self._rank, self._once = drawn.randrange(RANKS), TIMEOUT_S * 3

    def wait(self, kind: str, seconds: float | None = None) -> None:
        """If it is this that is slow, here."""
        if kind == self.kind and os.environ["LOCAL_RANK"] == str(self._rank):
            time.sleep(self._once if seconds is None else seconds)


def alive(count: int, first: int = 0) -> dict[str, Any]:
    """Runs in which something is slow: false alarms."""
    workload, captured, plan = planned("two-branch", 8)
    prepare(captured, plan.stage_graph, workload)
    assert workload.data is not None
    batches = list(islice(workload.data(8, 0), 9))
    count, alarms, done = min(count, 50), list[str](), 0
    for seed in range(first, first + count):
        slow = _Slow(seed)

        def data(batch_size: int, epoch: int, slow: _Slow = slow) -> Iterator[Batch]:
            slow.wait("start-up")
            for i, batch in enumerate(batches):
                if i == 0:
                    slow.wait("first step")
                slow.wait("every batch", TIMEOUT_S / 4)
                yield batch

        def held_out(batch_size: int, slow: _Slow = slow) -> list[Batch]:
            slow.wait("evaluation")
            return batches[:1]

        class SlowToSave(torch.optim.AdamW):
            def state_dict(self, slow: _Slow = slow) -> dict[str, Any]:
                slow.wait("save")
                return super().state_dict()

        slowly = replace(workload, data=data, eval_data=held_out, optimizer=SlowToSave)

        def rank(folder: Path, slowly: Workload = slowly) -> Run:
            return train(
                slowly,
                plan,
                captured=captured,
                steps=8,
                save=folder / "run",
                check_gradients=False,
            )

        with tempfile.TemporaryDirectory() as name:
            try:
                launch.run(rank, RANKS, Path(name), stall_timeout=TIMEOUT_S)
                done += 1
            except StageFailedError as error:
                alarms.append(f"{slow.kind}: {error}")
    return {"slow but alive": count, "went on to their end": done, "false alarms": alarms}
