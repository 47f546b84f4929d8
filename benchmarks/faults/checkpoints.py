"""Checkpoints: drawn damages, and how long a save in the background holds training up."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch

import anabranch
from anabranch import launch
from anabranch.checkpoint import Checkpoint
from anabranch.cluster import Cluster
from anabranch.errors import FileFormatError
from anabranch.models import build
from anabranch.plans.plan import Plan
from anabranch.runtime.pipeline import Pipeline
from anabranch.workload import Batch, NamedParameters, Workload
from benchmarks.faults.damage import DAMAGES, damaged

RANKS = 2


def adam(parameters: NamedParameters) -> torch.optim.Optimizer:
    """Two tensors and a count per parameter."""
    return torch.optim.AdamW(parameters, lr=1e-3)


def cosine(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """A scheduler with a state."""
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)


def planned(name: str, batch_size: int, **options: Any) -> tuple[Workload, Any, Plan]:
    """A built-in model with Adam and a scheduler, as a pipeline on two ranks."""
    workload = build(name, preset="small", **options)
    workload = replace(workload, optimizer=adam, scheduler=cosine)
    captured = anabranch.capture(workload.module, workload.example)
    profile = anabranch.measure(captured, (batch_size // 8, batch_size // 4), repeats=1)
    machines = Cluster.preset(f"local:{RANKS}")
    plan = anabranch.plan(profile, machines, batch_size, planner="sequential", max_replicas=1)
    return workload, captured, plan


def batches(workload: Workload, size: int) -> Iterator[Batch]:
    """Batches of a workload without end."""
    assert workload.data is not None
    for epoch in range(10**6):
        yield from workload.data(size, epoch)


def damage(count: int) -> dict[str, Any]:
    """Damages of every kind in turn: how many are refused with a file's name."""
    workload, captured, plan = planned("two-branch", 32)

    def rank(folder: Path) -> None:
        pipe = Pipeline(workload, plan, captured=captured, check_gradients=False)
        for step, batch in enumerate(islice(batches(workload, 32), 2), 1):
            pipe.step(batch)
            pipe.save(folder / f"step-{step}")

    refused: Counter[str] = Counter()
    silent = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        launch.run(partial(rank, folder / "run"), RANKS)
        kinds = list(DAMAGES)
        for seed in range(count):
            kind, target = kinds[seed % len(kinds)], folder / str(seed)
            done = damaged(folder / "run" / "step-2", folder / "run" / "step-1", target, kind, seed)
            try:
                Checkpoint(target).verify()
                silent.append(done)
            except FileFormatError as error:
                refused[kind] += f"{target}/" in str(error)
    named = sum(refused.values())
    return {"damaged": count, "refused, file named": named, "silent": silent, **refused}


def saves(count: int) -> dict[str, Any]:
    """Seconds of a step in which a checkpoint is begun beside those of the others."""
    workload, captured, plan = planned("mmt", 64)
    steps = min(count, 40)

    def rank(folder: Path) -> tuple[list[float], list[float]]:
        pipe = Pipeline(workload, plan, captured=captured, check_gradients=False)
        source = batches(workload, 64)
        plain: list[float] = []
        saving: list[float] = []
        for step in range(steps + 4):
            batch = next(source)
            begun = time.perf_counter()
            pipe.step(batch)
            taken = time.perf_counter() - begun
            if step < 4:
                pipe.save(folder / f"first-{step}", wait=False)  # memory of the copy
                pipe.finish_saving()
                continue
            plain.append(taken)
            begun = time.perf_counter()
            pipe.save(folder / f"step-{step}", wait=False, keep=2)
            saving.append(time.perf_counter() - begun)
            pipe.finish_saving()
        return plain, saving

    with tempfile.TemporaryDirectory() as name:
        plain, saving = launch.run(partial(rank, Path(name)), RANKS)[0]
    step, stall = statistics.median(plain), statistics.median(saving)
    return {
        "step, median ms": round(step * 1e3, 2),
        "stall of a save, median ms": round(stall * 1e3, 2),
        "stall / step": round(stall / step, 4),
    }
