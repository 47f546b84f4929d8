"""Several systems in one run: the same forked ranks, turns of a few steps each, one barrier before
every step.

The speed of a shared machine drifts, so figures of different runs do not compare; those of one run
do. A step takes as long as its slowest rank, and what counts is the median step.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch.distributed as dist

from anabranch import launch
from benchmarks.runtime.ops import precise_sleep

Step = Callable[[], object]
"""One training step of one rank; it returns when this rank may begin the next one."""

Side = Callable[[], Step]
"""Called in every rank, at the same time; makes what a system needs."""

LIMIT_S = 900.0


def race(
    sides: Mapping[str, Side],
    num_ranks: int,
    *,
    turns: int = 3,
    steps: int = 3,
    warm: int = 2,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds of every step of every side.

    Args:
        sides: by name; all are made before the first step of any.
        num_ranks: local ranks, one thread each, that meet through Gloo.
        turns: how often each side comes to turn.
        steps: timed steps per turn.
        warm: steps of each side that are not timed; the first ones set buffers up.
        clock: ``time.process_time`` for the work of a rank's processor instead, which a busy
            machine does not stretch.
    """

    def rank() -> dict[str, list[float]]:
        precise_sleep()
        return rank_times(sides, turns=turns, steps=steps, warm=warm, clock=clock)

    return slowest(launch.run(rank, num_ranks, timeout=LIMIT_S))


def rank_times(
    sides: Mapping[str, Side],
    *,
    turns: int = 3,
    steps: int = 3,
    warm: int = 2,
    clock: Callable[[], float] = time.perf_counter,
    meet: Callable[[], object] = dist.barrier,
) -> dict[str, list[float]]:
    """What ``race`` does in each rank: seconds of every step of this one.

    Args:
        meet: waits for all ranks.
    """
    ready = {name: side() for name, side in sides.items()}
    for step in ready.values():
        for _ in range(warm):
            _timed(step, clock, meet)
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(turns):
        for name, step in ready.items():
            times[name] += [_timed(step, clock, meet) for _ in range(steps)]
    meet()
    return times


def slowest(ranks: Sequence[Mapping[str, list[float]]]) -> dict[str, list[float]]:
    """Of every step of every side, the seconds of the rank that took longest."""
    return {
        name: [max(step) for step in zip(*(times[name] for times in ranks), strict=True)]
        for name in ranks[0]
    }


def medians(times: Mapping[str, list[float]]) -> dict[str, float]:
    """The median step of every side."""
    return {name: statistics.median(each) for name, each in times.items()}


def _timed(step: Step, clock: Callable[[], float], meet: Callable[[], object]) -> float:
    meet()
    start = clock()
    step()
    return clock() - start
