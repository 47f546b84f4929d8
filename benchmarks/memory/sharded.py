"""Sharing the optimizer's state among replicas: state of a rank, and the step without and with it.

python -m benchmarks.memory.sharded [--models mmt dlrm] [--ranks 2 4] [--json]

Built-in models in their small presets as data parallelism on local ranks. The same ranks train two
copies of the model without sharing and two with it, in turns of a few steps, one by one and in a
row: a difference between the two ways that is no larger than the one between two copies is none.
The machine is calibrated and the model profiled first, so that ``plan`` may say whether it shares.
"""

from __future__ import annotations

import argparse
import json
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
from anabranch.calibration.measure import Calibrated, calibrate
from anabranch.cli.source import measured
from anabranch.models import MODELS, build
from anabranch.plans.plan import Plan
from anabranch.runtime.pipeline import Pipeline
from benchmarks.planners.common import Row, table
from benchmarks.prediction.__main__ import BATCH, local

TURNS, SETTLING, STEPS = 8, 2, 6
"""Turns that count, after one that does not; steps of a turn before any counts, and with them."""

WAYS = (False, True, True, False)
"""Whether the copies share."""


@dataclass
class Trained:
    """Bytes of state on this rank, and seconds of steps one by one and in a row."""

    state_bytes: int = 0
    step_s: list[float] = field(default_factory=list)
    row_s: list[float] = field(default_factory=list)


def rows(model: str, counts: list[int], machine: Calibrated) -> list[Row]:
    """One row per number of ranks."""
    workload = build(model, preset="small")
    captured = anabranch.capture(workload.module, workload.example)
    sizes = tuple(1 << i for i in range(BATCH.bit_length()))
    profile = measured(captured, workload, sizes, "cpu")
    found = []
    for count in counts:
        make = partial(
            anabranch.plan, profile, local(machine, count), BATCH, planner="data-parallel"
        )
        whole, shared = (make(shard_optimizer=shares) for shares in (False, True))
        copies = list(zip(*launch.run(trained, count, model, whole, timeout=200.0), strict=True))
        ways = copies[::3], copies[1:3]
        step_s, row_s = (
            [[_slowest(copy, name) for copy in way] for way in ways] for name in ("step_s", "row_s")
        )
        found.append(
            {
                "model": model,
                "ranks": count,
                "taken": make().shard_optimizer,
                "predicted_s": [chosen.figures.step_s for chosen in (whole, shared)],
                "state_bytes": [[one.state_bytes for one in copy] for copy in copies[:2]],
                "step_s": [statistics.fmean(way) for way in step_s],
                "row_s": [statistics.fmean(way) for way in row_s],
                "apart": max(max(way) / min(way) - 1 for way in (*step_s, *row_s)),
            }
        )
    return found


def _slowest(by_rank: Sequence[Trained], name: str) -> float:
    """The median of the rank whose steps, or those in a row, take longest."""
    return max(statistics.median(getattr(one, name)) for one in by_rank)


def trained(model: str, plan: Plan) -> list[Trained]:
    """On one rank, of each copy."""
    found = [Trained() for _ in WAYS]
    ways = []
    for shares, one in zip(WAYS, found, strict=True):
        workload = build(model, preset="small")
        pipe = Pipeline(workload, plan, check_gradients=False, shard_optimizer=shares)
        ways.append((one, pipe, list(islice(pipe.batches(), STEPS))))
    for turn in range(1 + TURNS):
        for one, pipe, batches in ways if turn % 2 else reversed(ways):
            dist.barrier()
            seconds = [_seconds(pipe, [batch]) for batch in batches]
            dist.barrier()
            in_a_row = _seconds(pipe, batches, in_a_row=True) / STEPS
            if turn:
                one.step_s += seconds[SETTLING:]
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
    """State as shares of the whole, by rank; milliseconds without and with sharing, and how far two
    copies of one way are apart.
    """

    def pair(seconds: list[float]) -> str:
        without, shared = seconds
        return f"{without * 1e3:.1f}, {shared * 1e3:.1f} ({shared / without:.3f})"

    lines = [
        [
            row["model"],
            f"{row['ranks']}",
            ", ".join(f"{s / w:.3f}" for w, s in zip(*row["state_bytes"], strict=True)),
            "yes" if row["taken"] else "no",
            *(pair(row[name]) for name in ("predicted_s", "step_s", "row_s")),
            f"{row['apart']:.1%}",
        ]
        for row in found
    ]
    head = ["model", "ranks", "state / whole, by rank", "taken by `plan`"]
    return table([*head, "predicted ms", "step ms", "in a row ms", "copies apart"], lines)


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
