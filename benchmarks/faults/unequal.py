"""A rank whose processor others share: what training says, and what ``--replan`` gains.

Rank 0 and rank 1 have a core each; on that of rank 1 so many other processes compute all the time.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import anabranch
from anabranch import launch
from anabranch.cluster import Cluster
from anabranch.models import build
from anabranch.record import Run
from anabranch.runtime.plan_parts import prepare
from anabranch.solve.replanning import Replanner
from anabranch.training import Looks, train
from benchmarks.faults.checkpoints import RANKS

BATCH, STEPS = 64, 120
OTHERS = (0, 1)
"""Processes that share the core of rank 1, in runs one after the other."""


def _spin(core: int) -> None:
    os.sched_setaffinity(0, {core})
    while True:
        pass


@contextmanager
def _others(count: int, core: int) -> Iterator[None]:
    spinning = [multiprocessing.Process(target=_spin, args=(core,)) for _ in range(count)]
    for process in spinning:
        process.start()
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
            process.join()
            process.close()


def unequal(count: int) -> dict[str, Any]:
    """The transformer, small preset, two stages: with and without ``replans``."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < RANKS:
        return {"skipped": f"{len(cores)} cores; each of {RANKS} ranks needs its own"}
    workload = build("transformer", preset="small")
    captured = anabranch.capture(workload.module, workload.example)
    profile = anabranch.measure(captured, (8, 16, 32, 64), repeats=2)
    machines = Cluster.preset(f"local:{RANKS}")
    options = {"max_replicas": 1, "microbatch_size": 8}
    plan = anabranch.plan(profile, machines, BATCH, **options)
    prepare(captured, plan.stage_graph, workload)

    def rank(replans: bool) -> Run:
        os.sched_setaffinity(0, {cores[int(os.environ["LOCAL_RANK"])]})
        replanner = Replanner(profile, machines, options)
        return train(
            workload,
            plan,
            captured=captured,
            steps=STEPS,
            check_gradients=False,
            looks=Looks(every=40, replans=replans, replanner=replanner),
        )

    found: dict[str, Any] = {}
    for others in OTHERS:
        with _others(others, cores[1]):
            for replans in (False, True):
                run: Run = launch.run(rank, RANKS, replans)[0]
                what = f"{others} others, {'with' if replans else 'without'} --replan"
                found[f"{what}: step in a row, ms"] = round(run.period_s * 1e3, 1)
                found[f"{what}: slow"] = list(run.stragglers)
                if replans:
                    found[f"{what}: changes"] = list(run.plan_changes)
                found[f"{what}: last losses"] = round(statistics.fmean(run.losses[-10:]), 4)
    return found
