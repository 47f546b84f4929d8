"""One run: a contender on a task, with a seed and a learning rate."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from anabranch.workload import Workload
from benchmarks.convergence.contenders import CONTENDERS
from benchmarks.convergence.tasks import TASKS
from benchmarks.planners.common import Row
from benchmarks.replay import Replay


@dataclass(frozen=True)
class Run:
    """What decides a run's figures, besides versions of Python and torch.

    Attributes:
        task: key of ``TASKS``.
        stages: number of them.
        optimizer: key of ``OPTIMIZERS``.
        lr: learning rate.
        contender: key of ``CONTENDERS``.
        seed: of initial weights and order of samples.
        epochs: number of them; the pipeline is drained after each.
    """

    task: str
    stages: int
    optimizer: str
    lr: float
    contender: str
    seed: int
    epochs: int


def train(run: Run) -> Row:
    """Accuracies and mean losses after every epoch."""
    task, contender = TASKS[run.task](), CONTENDERS[run.contender]
    recipe = contender.recipe(run.optimizer)
    if recipe is None:
        raise ValueError(f"{run.contender} is not for {run.optimizer}")
    task.module.reset(run.seed)
    task.module.zero_grad()
    workload = Workload(
        task.module,
        task.gather(task.held_out[: task.batch_size]),
        optimizer=lambda parameters: recipe(parameters, run.lr),
    )
    replay = Replay(
        workload,
        task.stages(1 if contender.whole else run.stages),
        contender.policy(),
        batch_size=task.batch_size,
        captured=task.captured,
    )
    accuracies, means = [], []
    for epoch in range(run.epochs):
        losses = list(replay.train(task.batches(run.seed, epoch)))
        means.append(math.fsum(losses) / len(losses))
        accuracies.append(task.accuracy())
        if not math.isfinite(means[-1]):
            # What is not a number stays so.
            accuracies += accuracies[-1:] * (run.epochs - epoch - 1)
            break
    return {"accuracy": accuracies, "loss": means, "updates": replay.updates}


def deterministic() -> None:
    """One thread, so that sums are made in one order."""
    torch.set_num_threads(1)
