"""Sharing the optimizer's state among replicas: state of a rank, and the step without and with it.

python -m benchmarks.memory.sharded [--models mmt dlrm] [--ranks 2 4] [--json]

Built-in models in their small presets as data parallelism on local ranks. The same ranks train two
copies of the model without sharing and two with it, in turns of a few steps, one by one and in a
row. Each turn has a ratio of the two ways: ranks of a shared machine are on one core for seconds
now and then, which makes seconds twice as many, but few ratios. The machine is calibrated and the
model profiled first, so that ``plan`` may say whether it shares.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

import torch.distributed as dist
from torch import Tensor

import anabranch
from anabranch import launch
from anabranch.calibration.measure import calibrate
from anabranch.cluster import Cluster
from anabranch.graph.capture import Captured
from anabranch.models import MODELS, build
from anabranch.plans.plan import Plan
from anabranch.runtime.pipeline import Pipeline
from anabranch.workload import Workload
from benchmarks.planners.common import Row, table
from benchmarks.prediction.__main__ import BATCH, local

TURNS, SETTLING, STEPS = 16, 2, 6
"""Turns that count, after one that does not; steps of a turn before any counts, and with them."""

WAYS = (False, True, True, False)
"""Whether the copies share, in the order of a turn."""


@dataclass
class Trained:
    """Bytes of state on this rank, and seconds of a step alone and in a row, by turn."""

    state_bytes: int = 0
    step_s: list[float] = field(default_factory=list)
    row_s: list[float] = field(default_factory=list)


def rows(model: str, counts: list[int], machine: Cluster) -> list[Row]:
    """One row per number of ranks."""
    workload, captured = captured_model(model)
    sizes = tuple(1 << i for i in range(BATCH.bit_length()))
    profile = anabranch.measure_workload(workload, sizes, captured=captured)
    found = []
    for count in counts:
        make = partial(
            anabranch.plan, profile, local(machine, count), BATCH, planner="data-parallel"
        )
        whole, shared = (make(shard_optimizer=shares) for shares in (False, True))
        made = [captured_model(model) for _ in WAYS]
        copies = list(zip(*launch.run(trained, count, made, whole, timeout=200.0), strict=True))
        found.append(
            {
                "model": model,
                "ranks": count,
                "taken": make().shard_optimizer,
                "predicted_s": [chosen.figures.step_s for chosen in (whole, shared)],
                "state_bytes": [[one.state_bytes for one in copy] for copy in copies[:2]],
                "step": compared([[one.step_s for one in copy] for copy in copies]),
                "row": compared([[one.row_s for one in copy] for copy in copies]),
            }
        )
    return found


def compared(seconds: Sequence[Sequence[Sequence[float]]]) -> dict[str, Any]:
    """The two ways, of seconds by copy, rank and turn; the rank that takes longest counts.

    Returns:
        Median seconds without and with sharing; the median ratio, and its standard error.
    """
    slowest = [list(map(max, zip(*by_rank, strict=True))) for by_rank in seconds]
    without, shared = (
        [statistics.fmean(pair) for pair in zip(*copies, strict=True)]
        for copies in (slowest[::3], slowest[1:3])
    )
    ratios = [s / w for s, w in zip(shared, without, strict=True)]
    low, ratio, high = statistics.quantiles(ratios, n=4)
    return {
        "seconds": [statistics.median(way) for way in (without, shared)],
        "ratio": ratio,
        "error": 0.93 * (high - low) / math.sqrt(len(ratios)),
    }


def captured_model(model: str) -> tuple[Workload, Captured]:
    """A copy of a model, here rather than in every rank."""
    workload = build(model, preset="small")
    return workload, anabranch.capture(workload.module, workload.example)


def trained(made: Sequence[tuple[Workload, Captured]], plan: Plan) -> list[Trained]:
    """On one rank, of each copy."""
    found = [Trained() for _ in WAYS]
    ways = []
    for shares, one, (workload, captured) in zip(WAYS, found, made, strict=True):
        options = {"captured": captured, "shard_optimizer": shares}
        pipe = Pipeline(workload, plan, check_gradients=False, **options)
        ways.append((one, pipe, list(islice(pipe.batches(), STEPS))))
    for turn in range(1 + TURNS):
        for one, pipe, batches in ways if turn % 2 else reversed(ways):
            dist.barrier()
            seconds = [_seconds(pipe, [batch]) for batch in batches]
            dist.barrier()
            in_a_row = _seconds(pipe, batches, in_a_row=True) / STEPS
            if turn:
                one.step_s.append(statistics.median(seconds[SETTLING:]))
                one.row_s.append(in_a_row)
    for one, pipe, _ in ways:
        entries = pipe.optimizer.state.values() if pipe.optimizer else ()
        tensors = [t for e in entries for t in e.values() if isinstance(t, Tensor) and t.ndim]
        one.state_bytes = sum(t.nbytes for t in tensors)
    return found


def _seconds(pipe: Pipeline, batches: list[Any], *, in_a_row: bool = False) -> float:
    begun = time.perf_counter()
    if in_a_row:
        for _ in pipe.steps(batches):
            pass
    else:
        for batch in batches:
            pipe.step(batch)
    return time.perf_counter() - begun


def show(found: list[Row]) -> str:
    """State as shares of the whole, by rank; milliseconds without and with sharing."""

    def pair(seconds: list[float], ratio: str) -> str:
        return f"{seconds[0] * 1e3:.1f}, {seconds[1] * 1e3:.1f} ({ratio})"

    def timed(way: dict[str, Any]) -> str:
        return pair(way["seconds"], f"{way['ratio']:.3f} +- {way['error']:.3f}")

    lines = [
        [
            row["model"],
            f"{row['ranks']}",
            ", ".join(f"{s / w:.3f}" for w, s in zip(*row["state_bytes"], strict=True)),
            "yes" if row["taken"] else "no",
            pair(row["predicted_s"], f"{row['predicted_s'][1] / row['predicted_s'][0]:.3f}"),
            *(timed(row[name]) for name in ("step", "row")),
        ]
        for row in found
    ]
    head = ["model", "ranks", "state / whole, by rank", "taken by `plan`"]
    return table([*head, "predicted ms", "step ms", "in a row ms"], lines)


def main() -> None:
    """Measure, then print a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--models", nargs="*", choices=MODELS, default=list(MODELS))
    parser.add_argument("--ranks", nargs="*", type=int, default=[2, 4])
    arguments = parser.parse_args()
    machine = calibrate()
    found = []
    for model in arguments.models:
        found += rows(model, arguments.ranks, machine)
        sys.stderr.write(f"{json.dumps(found[-len(arguments.ranks) :])}\n")
    sys.stdout.write(f"{json.dumps(found, indent=2) if arguments.json else show(found)}\n")


if __name__ == "__main__":
    main()
