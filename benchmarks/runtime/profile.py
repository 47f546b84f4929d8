"""Where the runtime's own time goes: a profile of the first rank of a pipeline that computes
nothing.

Two ranks, 1F1B, messages of 4 KB. ``inside`` is time in the function itself, ``with calls`` what
is below it as well, both in time of the processor: who waits spends none. The profiler itself makes
small functions look dearer than they are.
"""

from __future__ import annotations

import cProfile
import pstats
import time

import torch
import torch.distributed as dist

from anabranch import launch
from benchmarks.planners.common import Row, table
from benchmarks.runtime import ours
from benchmarks.runtime.messages import Two
from benchmarks.runtime.sleeps import numbered

MICROBATCHES, STEPS, SHOWN = 32, 20, 40


def rows() -> list[Row]:
    """One row per function, dearest first, in seconds per step."""
    batch, example = torch.zeros(MICROBATCHES, 1024), torch.zeros(2, 1024)
    captured = ours.captured_model(Two(), example)
    plan = ours.plan_of(captured, numbered(2), [[0], [1]], microbatches=MICROBATCHES)
    side = ours.our_side(captured, example, plan, batch)

    def rank() -> list[Row]:
        step = side()
        for _ in range(3):
            step()
        watch = cProfile.Profile(time.thread_time)
        dist.barrier()
        watch.enable()
        for _ in range(STEPS):
            step()
        watch.disable()
        return _functions(watch)

    return launch.run(rank, 2)[0]


def _functions(watch: cProfile.Profile) -> list[Row]:
    found = []
    for (file, line, name), (_, calls, inside, below, _) in pstats.Stats(watch).stats.items():  # type: ignore[attr-defined]
        place = "/".join(file.split("/")[-2:])
        found.append(
            {
                "function": name if line == 0 else f"{place}:{line} {name}",
                "calls": calls / STEPS,
                "inside_s": inside / STEPS,
                "with_calls_s": below / STEPS,
            }
        )
    return sorted(found, key=lambda row: -row["inside_s"])


def show(found: list[Row]) -> str:
    """The dearest functions."""
    lines = [
        [
            f"`{row['function']}`",
            f"{row['calls']:.1f}",
            f"{row['inside_s'] * 1e6:.0f}",
            f"{row['with_calls_s'] * 1e6:.0f}",
        ]
        for row in found[:SHOWN]
    ]
    return table(["function", "calls per step", "inside us", "with calls us"], lines)
