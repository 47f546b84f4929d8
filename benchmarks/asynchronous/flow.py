"""Several ways to train in one run, each as a stretch of mini-batches that is timed in its middle.

Without a flush there is no step to put a barrier around: a barrier would empty the pipeline. So a
side trains on a stretch of mini-batches, and what counts is the time from one of the first losses
to one of the last, while the pipeline is full. Synchronous sides are timed in the same way, from
the end of one step to the end of another. Sides take turns, with a barrier between, because the
speed of a shared machine drifts.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping

import torch.distributed as dist

from anabranch import launch
from benchmarks.runtime.ops import precise_sleep

Train = Callable[[int], Iterator[object]]
"""Called with a number of mini-batches: trains on them and yields once for each."""

Side = Callable[[], Train]
"""Called in every rank, at the same time; makes what a way to train needs."""

LIMIT_S = 900.0
SETTLE = 9
"""Mini-batches before the clock starts, and before the end when it stops; more than a side has in
flight, whose last losses come with its drain."""


def seconds_per_batch(
    sides: Mapping[str, tuple[Side, int]], num_ranks: int, *, turns: int = 3
) -> dict[str, float]:
    """The median over the turns of the seconds per mini-batch on the slowest rank.

    Args:
        sides: by name, with the mini-batches that are timed in one turn.
        num_ranks: local ranks, one thread each, that meet through Gloo.
        turns: how often each side comes to turn; one more turn before is not timed.
    """

    def rank() -> dict[str, list[float]]:
        precise_sleep()
        ready = {name: (side(), count) for name, (side, count) in sides.items()}
        times: dict[str, list[float]] = {name: [] for name in sides}
        for turn in range(turns + 1):
            for name, (train, count) in ready.items():
                dist.barrier()
                seconds = _stretch(train, count)
                if turn:
                    times[name].append(seconds)
        dist.barrier()
        return times

    found = launch.run(rank, num_ranks, timeout=LIMIT_S)
    return {
        name: statistics.median(max(each) for each in zip(*(of[name] for of in found), strict=True))
        for name in sides
    }


def _stretch(train: Train, count: int) -> float:
    """Seconds per mini-batch between the losses of the settled part."""
    moments = []
    for _ in train(count + 2 * SETTLE):
        moments.append(time.perf_counter())
    return (moments[SETTLE + count - 1] - moments[SETTLE - 1]) / count
