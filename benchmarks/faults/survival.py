"""Ranks that are killed while the others live on, beside a restart from disk, and what copies of
the state cost while all is well.
"""

from __future__ import annotations

import mmap
import os
import random
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from anabranch import launch
from anabranch.cli.training.restarts import train_with_restarts
from anabranch.cli.training.training_settings import TrainingSettings
from anabranch.plans.plan import Plan
from anabranch.record import Run
from anabranch.runtime.pipeline import Pipeline
from anabranch.runtime.state.spare_copies import Moment, SpareCopies, Survival
from anabranch.training import Event, StepEvent, train
from anabranch.training.reporter import Reporter
from anabranch.workload import Batch
from benchmarks.faults.checkpoints import RANKS, batches, planned

STEPS, EVERY = 60, 10
KINDS = ("one", "two at once", "one, and one in the recovery")

_STEP, _KILLED, _KILLED_AT, _NEXT_AT, _KILLS, _FIRST_AT = range(6)
_ADD = Reporter.add


class _Case:
    """Training in which drawn ranks are killed a drawn time after a drawn batch was read.

    Attributes:
        first_s: seconds from the kill to the next finished step, which may be done again.
        seconds: to the first that had not been told before.
        again: finished steps that were done again.
    """

    def __init__(self, made: tuple[Any, Any, Any], seed: int, kind: str) -> None:
        self._made, self._kind, drawn = made, kind, random.Random(seed)
        self._victims = range(RANKS) if kind == KINDS[1] else [drawn.randrange(RANKS)]
        self._step, self._delay_s = drawn.randrange(8, STEPS - 2), drawn.uniform(0.0, 0.05)
        self._other, self._other_delay_s = drawn.randrange(RANKS), drawn.uniform(0.0, 0.3)
        self._shared = memoryview(mmap.mmap(-1, 64)).cast("q")
        self.copies: SpareCopies | None = None
        self.again = 0

    @property
    def seconds(self) -> float:
        return (self._shared[_NEXT_AT] - self._shared[_KILLED_AT]) / 1e9

    @property
    def first_s(self) -> float:
        return (self._shared[_FIRST_AT] - self._shared[_KILLED_AT]) / 1e9

    def _kill(self, kills: int) -> None:
        """End this process, if so many have not been ended before."""
        if self._shared[_KILLS] < kills:
            self._shared[_KILLS] += 1
            self._shared[_KILLED] = self._shared[_STEP]
            self._shared[_NEXT_AT] = self._shared[_FIRST_AT] = 0
            self._shared[_KILLED_AT] = time.monotonic_ns()
            os.kill(os.getpid(), signal.SIGKILL)

    def data(self, batch_size: int, epoch: int) -> Iterator[Batch]:
        rank = dist.get_rank()
        for i, batch in enumerate(self._made[0].data(batch_size, epoch)):
            if epoch == 0 and i == self._step and rank in self._victims:
                threading.Timer(self._delay_s, self._kill, [len(self._victims)]).start()
            yield batch

    def tell(self, event: Event) -> None:
        if isinstance(event, StepEvent):
            shared = self._shared
            shared[_STEP] = max(shared[_STEP], event.step)
            if shared[_KILLED_AT] and not shared[_NEXT_AT] and event.step > shared[_KILLED]:
                shared[_NEXT_AT] = time.monotonic_ns()

    def rank(self, plan: Plan, asked: TrainingSettings) -> Run:
        recovers = self.copies is not None and self.copies.attempt.value == 1
        if recovers and self._kind == KINDS[2] and dist.get_rank() == self._other:
            threading.Timer(self._other_delay_s, self._kill, [2]).start()
        began, shared = time.monotonic_ns(), self._shared

        def add(reporter: Reporter, loss: float, seconds: float) -> None:
            if 0 < shared[_KILLED_AT] < began and not shared[_FIRST_AT]:
                shared[_FIRST_AT] = time.monotonic_ns()
            _ADD(reporter, loss, seconds)

        Reporter.add = add  # type: ignore[method-assign]
        return train(
            replace(self._made[0], data=self.data, eval_data=None),
            plan,
            captured=self._made[1],
            steps=asked.last_step,
            resume=asked.resume,
            save=asked.save,
            save_every=asked.saves(),
            check_gradients=False,
            callbacks=[self.tell],
            copies=self.copies,
        )

    def undisturbed(self) -> Run:
        self._shared[_KILLS] = RANKS
        run = launch.run(self.rank, RANKS, self._made[2], TrainingSettings(steps=STEPS))[0]
        self._shared[_KILLS] = self._shared[_STEP] = 0
        return run

    def survived(self) -> Run:
        copies = self.copies = SpareCopies(RANKS, EVERY)

        def begin(ranks: int, failure: str, moment: Moment | None) -> tuple[Any, ...]:
            assert moment is not None
            self.again = max(self.again, self._shared[_STEP] - moment.step)
            return self._made[2], TrainingSettings(steps=STEPS)

        try:
            arguments = self._made[2], TrainingSettings(steps=STEPS)
            return launch.run(
                self.rank, RANKS, *arguments, timeout=120.0, survival=Survival(copies, begin)
            )[0]
        finally:
            self.copies = None
            copies.close()

    def restarted(self, folder: Path) -> Run:
        """From the disk, with a checkpoint as often as there are copies."""

        def attempt(asked: TrainingSettings) -> Run:
            return launch.run(self.rank, RANKS, self._made[2], asked)[0]

        asked = TrainingSettings(
            steps=STEPS, save=folder / "run", save_every=str(EVERY), max_restarts=2
        )
        return train_with_restarts(attempt, asked, lambda text: None)[0]


def survivals(count: int, first: int = 0) -> dict[str, Any]:
    """SIGKILL at drawn times to one rank, to both, and to one more in the recovery."""
    made = planned("mmt", 64)
    torch.manual_seed(0)
    whole = _Case(made, 0, KINDS[0]).undisturbed()
    same, again, seconds, from_disk = 0, [], [], []
    firsts, firsts_from_disk = [], []
    count = min(count, 50)
    for seed in range(first, first + count):
        kind = KINDS[seed % len(KINDS)]
        torch.manual_seed(0)
        case = _Case(made, seed, kind)
        same += case.survived().losses == whole.losses
        again.append(case.again)
        seconds.append(case.seconds)
        firsts.append(case.first_s)
        if kind != KINDS[2] and seed % 5 == 0:
            torch.manual_seed(0)
            case = _Case(made, seed, kind)
            with tempfile.TemporaryDirectory() as name:
                case.restarted(Path(name))
            from_disk.append(case.seconds)
            firsts_from_disk.append(case.first_s)
    return {
        "killed, in runs": count,
        "losses bitwise those of an undisturbed run": same,
        "finished steps done again, most": max(again),
        "copies every": EVERY,
        "kill to the next finished step, median s": round(statistics.median(firsts), 2),
        "kill to the next finished step, most s": round(max(firsts), 2),
        "from disk, median s": round(statistics.median(firsts_from_disk), 2),
        "kill to the next new step, median s": round(statistics.median(seconds), 2),
        "kill to the next new step, most s": round(max(seconds), 2),
        "from disk to the next new step, median s": round(statistics.median(from_disk), 2),
    }


def copies(count: int) -> dict[str, Any]:
    """Steps in a row with a copy at their beginning, in turn with as many without."""
    workload, captured, plan = planned("mmt", 64)
    rounds, spare = min(max(count // 25, 4), 20), SpareCopies(RANKS, EVERY)

    def rank() -> tuple[list[float], list[float], list[float]]:
        pipe = Pipeline(
            workload, plan, captured=captured, check_gradients=False, copies=spare, check_copies=0
        )
        source, taken = batches(workload, 64), ([], [], [])  # without, with, the copy alone
        for _ in pipe.steps(islice(source, EVERY)):
            pass

        def some(copied: bool) -> Iterator[Batch]:
            for i, batch in enumerate(islice(source, EVERY)):
                if i == 1 and copied:
                    began = time.perf_counter()
                    pipe.copy_state({}, lambda loss: None)
                    taken[2].append(time.perf_counter() - began)
                yield batch

        for turn in range(2 * rounds):
            began = time.perf_counter()
            for _ in pipe.steps(some(turn % 2 == 1)):
                pass
            taken[turn % 2].append((time.perf_counter() - began) / EVERY)
        return taken

    torch.manual_seed(0)
    without, copied, alone = launch.run(rank, RANKS)[0]
    spare.close()
    step_s = statistics.median(without)
    return {
        "step of mmt small without, ms": round(1e3 * step_s, 2),
        "with a copy every 10, ms": round(1e3 * statistics.median(copied), 2),
        "a copy, median ms": round(1e3 * statistics.median(alone), 2),
        "copies, % of a step": round(100 * statistics.median(alone) / EVERY / step_s, 2),
    }
