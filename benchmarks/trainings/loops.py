"""Two loops over the same batches: anabranch's pipeline, and PyTorch's without one."""

from __future__ import annotations

import copy
import json
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path

import torch
from torch import Tensor, nn

import anabranch
from anabranch.checkpoint.series import checkpoints
from anabranch.runtime.plan_parts import prepare
from anabranch.training import JsonLines, SaveEvery, train
from anabranch.workload import Batch, Workload
from benchmarks.trainings.tasks import Score, Task


@dataclass(frozen=True)
class Curve:
    """How a training went.

    Attributes:
        losses: of all steps.
        steps: after which there is a score.
        scores: on held-out data.
        seconds: of the training, without the scores.
    """

    losses: tuple[float, ...]
    steps: tuple[int, ...]
    scores: tuple[float, ...]
    seconds: float


def pipelined(task: Task, workload: Workload, score: Score) -> tuple[anabranch.Plan, Curve]:
    """Measure, plan one stage per rank, train; scores are those of the checkpoints."""
    captured = anabranch.capture(workload.module, next(_batches(task, workload)))
    profile = anabranch.measure(captured, [task.microbatch_size, task.batch_size])
    plan = anabranch.plan(
        profile,
        anabranch.load_cluster(f"local:{task.ranks}"),
        task.batch_size,
        planner="graphpipe",
        microbatch_size=task.microbatch_size,
        max_replicas=1,
    )
    prepare(captured, plan.stage_graph, workload)  # once, rather than by every rank
    with tempfile.TemporaryDirectory() as scratch:
        run, log = Path(scratch, "run"), Path(scratch, "log.jsonl")

        def rank() -> float:
            began = time.perf_counter()
            train(
                workload,
                plan,
                steps=task.steps,
                captured=captured,
                save=run,
                save_every=SaveEvery(task.every, keep=task.steps),
                callbacks=[JsonLines(log)],
            )
            return time.perf_counter() - began

        seconds = anabranch.run(rank, len(plan.stage_graph.devices))[0]
        events = [json.loads(line) for line in log.read_text().splitlines()]
        losses = tuple(event["loss"] for event in events if event["event"] == "step")
        module = copy.deepcopy(workload.module)
        scores = {}
        for step, folder in checkpoints(run):
            module.load_state_dict(anabranch.load_state_dict(folder))
            scores[step] = score(module)
    return plan, Curve(losses, tuple(scores), tuple(scores.values()), seconds)


def alone(task: Task, workload: Workload, score: Score, *, coupled_samples: int) -> Curve:
    """One process; the loss is the mean of those of slices of so many samples."""
    torch.set_num_threads(1)
    module = copy.deepcopy(workload.module)
    optimizer = workload.optimizer(module.named_parameters())
    assert workload.scheduler is not None
    scheduler = workload.scheduler(optimizer)
    losses, scores, seconds = [], {}, 0.0
    for step, batch in enumerate(islice(_batches(task, workload), task.steps), 1):
        began = time.perf_counter()
        parts = [_loss(module, part) for part in _slices(batch, task.batch_size, coupled_samples)]
        loss = torch.stack(parts).mean()
        optimizer.zero_grad()
        loss.backward()
        if workload.clip_norm is not None:
            nn.utils.clip_grad_norm_(module.parameters(), workload.clip_norm)
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
        seconds += time.perf_counter() - began
        if step % task.every == 0:
            scores[step] = score(module)
    return Curve(tuple(losses), tuple(scores), tuple(scores.values()), seconds)


def _batches(task: Task, workload: Workload) -> Iterator[Batch]:
    for epoch in count():
        yield from workload.data(task.batch_size, epoch)


def _loss(module: nn.Module, batch: Batch) -> Tensor:
    loss: Tensor = module(**batch)["loss"]
    return loss


def _slices(batch: Batch, samples: int, size: int) -> Iterator[Batch]:
    """Cut a batch of tensors, or of lists of them."""
    for start in range(0, samples, size):
        part = slice(start, start + size)
        yield {
            name: [x[part] for x in value] if isinstance(value, list | tuple) else value[part]
            for name, value in batch.items()
        }
